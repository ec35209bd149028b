"""Products of activations and quantized weights."""

from pallas_kernels.quantized_matmul.api import get_matmul
from pallas_kernels.quantized_matmul.contract import SCHEMES, MatmulNeeds, MatmulOp, QuantizedWeight

__all__ = ["SCHEMES", "MatmulNeeds", "MatmulOp", "QuantizedWeight", "get_matmul"]
