"""Model folders as Hugging Face's transformers writes them: the family by `config.json`, and its tensors by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.errors import CheckpointError
from jaxinfer.model.architecture import Architecture
from jaxinfer.model.families.config_fields import ConfigFields
from jaxinfer.model.families.gemma import GEMMA2_NAMES, gemma2_architecture
from jaxinfer.model.families.layer_weights import HUGGINGFACE_NAMES, layer_parameter
from jaxinfer.model.families.llama import llama_architecture
from jaxinfer.model.families.qwen import qwen2_architecture, qwen3_architecture


class Family(NamedTuple):
    """One `model_type`.

    Attributes:
      class_name: transformers' class with a language model's head, as `architectures` lists it.
      architecture: reads the sizes.
      layer_names: part, as in `layer_weights`, -> name of its tensor in a layer.
    """

    class_name: str
    architecture: Callable[[ConfigFields], Architecture]
    layer_names: Mapping[str, str]


FAMILIES = {
    "llama": Family("LlamaForCausalLM", llama_architecture, HUGGINGFACE_NAMES),
    "qwen2": Family("Qwen2ForCausalLM", qwen2_architecture, HUGGINGFACE_NAMES),
    "qwen3": Family("Qwen3ForCausalLM", qwen3_architecture, HUGGINGFACE_NAMES),
    "gemma2": Family("Gemma2ForCausalLM", gemma2_architecture, GEMMA2_NAMES),
}
_TOP = {
    "top.embedding": "model.embed_tokens.weight",
    "top.norm.weight": "model.norm.weight",
    "top.head": "lm_head.weight",
}


def huggingface_architecture(config: Mapping[str, Any], source: str) -> Architecture:
    """Sizes and parts of a decoder from the contents of its `config.json`.

    Every field that would change the result is applied, or refused by name; others are ignored. Absent fields have
    transformers' defaults, except for sizes, which must be there.

    Args:
      config: the parsed file.
      source: the file, for errors.

    Raises:
      CheckpointError: an unknown family, a field of the wrong kind, or one that is not supported.
    """
    fields = ConfigFields(config, source)
    family = FAMILIES[_model_type(fields, source)]
    fields.refuse_what_is_never_run()
    return family.architecture(fields)


def huggingface_weight(
    arch: Architecture, name: str, load: Callable[[str], np.ndarray], order: str, source: str = "memory"
) -> np.ndarray:
    """One parameter, in the dtype that `load` gives.

    Args:
      name: `top.<path>` or `layers.<i>.<path>`, as in `model.params.fill`.
      load: tensor name -> array.
      order: weight order of `model.linear`.
      source: the folder, for errors.

    Raises:
      CheckpointError: a tensor has another shape than the configuration says.
    """

    def tensor(full_name: str, *shape: int) -> np.ndarray:
        found = load(full_name)
        if found.shape != shape:
            raise CheckpointError(f"{source}: {full_name} has shape {found.shape}; config.json needs {shape}")
        return found

    if name in _TOP:
        shape = (arch.hidden_size,) if name == "top.norm.weight" else (arch.vocab_size, arch.hidden_size)
        return tensor(_TOP[name], *shape)
    _, layer, path = name.split(".", 2)
    names = FAMILIES[arch.family].layer_names

    def part(part_name: str, *shape: int) -> np.ndarray:
        module, _, kind = part_name.partition(".")
        return tensor(f"model.layers.{layer}.{names[module]}.{kind}", *shape)

    return layer_parameter(arch, path, part, order)


def _model_type(fields: ConfigFields, source: str) -> str:
    """The key of FAMILIES that `model_type` and `architectures` agree on."""
    class_names = fields.get("architectures")
    if class_names is not None and (
        not isinstance(class_names, list) or len(class_names) != 1 or not isinstance(class_names[0], str)
    ):
        raise fields.error("architectures", "must be a list of one name")
    by_class = {family.class_name: name for name, family in FAMILIES.items()}
    given, known, field = fields.get("model_type"), list(FAMILIES), "model_type"
    if given is None and class_names is not None:
        given, known, field = class_names[0], list(by_class), "architectures"
    if given is None:
        raise fields.error("model_type", f"missing; this version runs: {', '.join(FAMILIES)}")
    if not isinstance(given, str) or given not in known:
        near = difflib.get_close_matches(str(given)[:80], known, 1, cutoff=0.0)
        raise CheckpointError(
            f"{source}: {field} is {str(given)[:80]!r}; this version runs: {', '.join(known)}; the nearest is {near[0]}"
        )
    name = by_class.get(given, given)
    if class_names is not None and class_names[0] != FAMILIES[name].class_name:
        raise fields.error(
            "architectures", f"{class_names[0][:80]!r}; only {FAMILIES[name].class_name} of {name} is run"
        )
    return name
