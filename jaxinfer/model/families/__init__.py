"""One file per model family: its configuration and weight names mapped on to the one decoder."""

from jaxinfer.model.families.huggingface import FAMILIES, huggingface_architecture, huggingface_weight
from jaxinfer.model.families.llama import gguf_architecture, gguf_weight

__all__ = ["FAMILIES", "gguf_architecture", "gguf_weight", "huggingface_architecture", "huggingface_weight"]
