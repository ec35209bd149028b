"""The alphabet is the one of the `tokenizers` package, and goes both ways."""

from tokenizers import pre_tokenizers

from jaxinfer.text.byte_level import BYTE_TO_CHAR, spelling_to_bytes


def test_alphabet_is_that_of_the_tokenizers_package():
    assert set(BYTE_TO_CHAR) == set(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "a é\n中😀\t\x00\x7f\u00ad"
    [(spelt, _)] = level.pre_tokenize_str(text)
    assert spelt == "".join(BYTE_TO_CHAR[byte] for byte in text.encode())


def test_every_byte_comes_back():
    assert len(set(BYTE_TO_CHAR)) == 256
    assert spelling_to_bytes("".join(BYTE_TO_CHAR)) == bytes(range(256))


def test_a_spelling_outside_the_alphabet_stands_for_its_own_text():
    assert spelling_to_bytes("Ġ▁") == "Ġ▁".encode()
