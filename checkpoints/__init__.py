"""Reading of model files. A leaf: it imports nothing of jaxinfer."""

from checkpoints.gguf import GGUFError, GGUFFile, TensorInfo
from checkpoints.huggingface import HuggingFaceError, HuggingFaceFolder

__all__ = ["GGUFError", "GGUFFile", "HuggingFaceError", "HuggingFaceFolder", "TensorInfo"]
