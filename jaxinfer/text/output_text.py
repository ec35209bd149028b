"""The visible text of one answer: ids through the detokenizer, then through the stop strings.

Ids are taken one by one, so that when a step yields several tokens the engine learns at which of them a stop string was
complete and can drop the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.request import SamplingParams
from jaxinfer.text.detokenizer import IncrementalDetokenizer
from jaxinfer.text.stop import StopChecker
from jaxinfer.text.tokenizer import Tokenizer


class OutputDelta(NamedTuple):
    """What some tokens added to an answer.

    Attributes:
      text: new text that is safe to show.
      stop_string: the stop string that ended the answer, or None.
      num_tokens_kept: how many of the tokens pushed belong to the answer, the one completing the stop string included.
    """

    text: str
    stop_string: str | None
    num_tokens_kept: int


class OutputText:
    """Text of one answer so far. One owner, one thread.

    Attributes:
      is_finished: True after a stop string or `finish`; nothing may be pushed then.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        """Starts an empty answer; of `params` it reads what concerns stop strings and special tokens."""
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._stop = StopChecker(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
        self._includes_stop = params.include_stop_str_in_output
        self._parts: list[str] = []
        self.is_finished = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._parts)

    def push(self, token_ids: Sequence[int]) -> OutputDelta:
        """Takes the answer's next tokens.

        Args:
          token_ids: without the end-of-sequence token or stop token that ended the answer: that one goes to `finish`.

        Raises:
          RequestError: an id outside the vocabulary.
        """
        assert not self.is_finished, "tokens after the end of the answer"
        parts: list[str] = []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            part, stop_string = self._stop.push(self._detokenizer.push((token_id,)))
            parts.append(part)
            if stop_string is not None:
                self.is_finished = True
                return OutputDelta(self._keep(parts), stop_string, num_tokens)
        return OutputDelta(self._keep(parts), None, len(token_ids))

    def finish(self, last_token_id: int | None = None) -> OutputDelta:
        """Ends the answer and gives the text held back so far.

        Not to be called once `push` has reported a stop string: that has ended the answer already.

        Args:
          last_token_id: the end-of-sequence token or stop token that ended the answer, None when neither did. Its text
            is left out unless `include_stop_str_in_output`; a control token's also needs `skip_special_tokens=False`.

        Returns:
          The rest of the text; a stop string when one is completed only by the last token or by the U+FFFD of an
          unfinished character; num_tokens_kept counts `last_token_id`.
        """
        assert not self.is_finished, "the answer has ended already"
        self.is_finished = True
        rest = ""
        if last_token_id is not None and self._includes_stop:
            rest = self._detokenizer.push((last_token_id,))
        part, stop_string = self._stop.push(rest + self._detokenizer.flush())
        parts = [part] if stop_string is not None else [part, self._stop.flush()]
        return OutputDelta(self._keep(parts), stop_string, 0 if last_token_id is None else 1)

    def _keep(self, parts: list[str]) -> str:
        text = "".join(parts)
        self._parts.append(text)
        return text
