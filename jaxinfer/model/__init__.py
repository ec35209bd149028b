"""The decoder as pure functions of arrays: parameters and pages in, hidden states, logits and pages out."""

from jaxinfer.model.architecture import Architecture, LinearRopeScaling, Llama3RopeScaling
from jaxinfer.model.decoder import Decoder, LayerCall, StepTokensInput, embed, final_norm, forward, logits
from jaxinfer.model.kv_pages import PageFormat, pages_for_layers, scrub
from jaxinfer.model.params import ModelParams, abstract_params, random_params
from jaxinfer.model.sharding import MeshRules

__all__ = [
    "Architecture",
    "Decoder",
    "LayerCall",
    "LinearRopeScaling",
    "Llama3RopeScaling",
    "MeshRules",
    "ModelParams",
    "PageFormat",
    "StepTokensInput",
    "abstract_params",
    "embed",
    "final_norm",
    "forward",
    "logits",
    "pages_for_layers",
    "random_params",
    "scrub",
]
