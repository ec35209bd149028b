"""The committed golden files of model families made anew, and folders that transformers itself has saved.

Finds out when transformers, or a file, has changed.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints import HuggingFaceFolder
from jaxinfer.model.families import huggingface_architecture

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

MODEL_TESTS = Path(__file__).parents[1] / "model"
sys.path.insert(0, str(MODEL_TESTS))
import make_family_goldens  # noqa: E402  its folder must be on the path first, and torch be there

# transformers and torch warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

# The same float32 program on another CPU sums in another order.
TOLERANCE = 2e-5


@pytest.mark.parametrize("name", make_family_goldens.MODELS)
def test_the_committed_file_is_what_transformers_computes_today(name):
    made = make_family_goldens.make(name)
    with np.load(MODEL_TESTS / "goldens" / f"{name}.npz", allow_pickle=False) as file:
        committed = dict(file)
    assert committed.keys() == made.keys()
    for key, value in committed.items():
        if key == "config":
            old, new = json.loads(str(value)), json.loads(str(made[key]))
            assert {**old, "transformers_version": None} == {**new, "transformers_version": None}
        elif key.startswith("logits"):
            assert np.abs(value - made[key]).max() <= TOLERANCE
        else:
            assert np.array_equal(value, made[key]), key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", make_family_goldens.MODELS)
def test_a_saved_folder_is_read_bit_for_bit(name, dtype, tmp_path):
    model, _ = make_family_goldens.random_model(name)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    folder = HuggingFaceFolder.open(tmp_path)
    with np.load(MODEL_TESTS / "goldens" / f"{name}.npz", allow_pickle=False) as file:
        committed = json.loads(str(file["config"]))
    assert huggingface_architecture(folder.config, name) == huggingface_architecture(committed, name)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == folder.tensors.keys()
    for key, value in parameters.items():
        got = folder.load(key)
        assert got.dtype.name == dtype
        assert np.array_equal(got.astype(np.float32), value.detach().float().numpy())
