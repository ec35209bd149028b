"""A model's architecture from its name, without its weights."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from jaxinfer.engine.load import gguf_model_architecture, open_model
from jaxinfer.errors import CheckpointError
from jaxinfer.model import Architecture
from jaxinfer.model.families import huggingface_architecture


def read_architecture(model: str) -> tuple[Architecture, str]:
    """The architecture, and a name for reports.

    Args:
      model: `builtin`, a GGUF file, a Hugging Face folder, or a config.json.

    Raises:
      CheckpointError: it is absent, damaged, or of a kind this version does not run.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise CheckpointError(f"model {model!r}: the folder has no config.json")
    if path.suffix == ".json":
        return huggingface_architecture(_read_json(path), path.name), str(path)
    if model != "builtin" and not path.exists():
        near = "; did you mean 'builtin'?" if difflib.get_close_matches(model, ["builtin"]) else ""
        raise CheckpointError(
            f"model {model!r}: no such file{near}; give `builtin`, the path of a .gguf file, of a Hugging Face "
            "folder, or of its config.json"
        )
    gguf, source = open_model(model)
    return gguf_model_architecture(gguf, source), source


def _read_json(path: Path) -> dict:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as why:
        raise CheckpointError(f"model {str(path)!r}: {why}") from why
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: a config.json holds one object")
    return config
