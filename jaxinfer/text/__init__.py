"""Host side text: tokens to and from text, chat templates, stop strings. No jax here."""

from jaxinfer.text.chat_template import ChatTemplate, RenderedChat
from jaxinfer.text.detokenizer import IncrementalDetokenizer
from jaxinfer.text.output_text import OutputDelta, OutputText
from jaxinfer.text.stop import StopChecker, StopResult
from jaxinfer.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "OutputDelta",
    "OutputText",
    "RenderedChat",
    "StopChecker",
    "StopResult",
    "Tokenizer",
]
