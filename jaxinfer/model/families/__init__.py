"""One file per model family: its configuration and weight names mapped on to the one decoder."""

from jaxinfer.model.families.llama import gguf_architecture, gguf_weight

__all__ = ["gguf_architecture", "gguf_weight"]
