"""Reading of model files. A leaf: it imports nothing of jaxinfer."""

from checkpoints.gguf import GGUFError, GGUFFile, TensorInfo

__all__ = ["GGUFError", "GGUFFile", "TensorInfo"]
