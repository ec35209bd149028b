"""What can only be checked with the model's vocabulary at hand: token ids in a request. Host code, no jax.

Out of range, an id would be dropped silently by a scatter on the device, or write the last row if it were -1.
"""

from collections.abc import Sequence

from jaxinfer.errors import RequestError
from jaxinfer.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams


def check_against_vocabulary(
    params: SamplingParams, vocab_size: int, bad_word_ids: Sequence[Sequence[int]] = ()
) -> None:
    """Refuses token ids that the model does not have, and bad words too long for the compiled programs.

    Raises:
      RequestError: `param` names the field.
    """
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name} names token id {token_id}; this model's ids are 0 to {vocab_size - 1}; leave it out", name
                )
    if len(bad_word_ids) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words make {len(bad_word_ids)} token sequences; at most {MAX_BAD_WORDS} are allowed; use fewer words",
            "bad_words",
        )
    for ids in bad_word_ids:
        if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words: one of them is {len(ids)} tokens long; 1 to {MAX_BAD_WORD_TOKENS} are allowed", "bad_words"
            )
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"bad_words: token id {token_id} is not one of the model's {vocab_size}", "bad_words"
                )
