"""README.md and docs/ say what the code says: every parameter, option, metric and error, and the tables word for word.

`python tests/test_docs.py` prints the README's two tables anew, from the classes' docstrings.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from jaxinfer import errors
from jaxinfer.config import EngineConfig
from jaxinfer.flags import attribute_texts
from jaxinfer.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from jaxinfer.step.memory import MemoryPlan

REPO = Path(__file__).resolve().parent.parent
PARTS = [f.default_factory for f in dataclasses.fields(EngineConfig) if f.default_factory is not dataclasses.MISSING]
ERRORS = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
DOCS = ("api", "architecture", "benchmarks", "metrics")
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def text(name):
    return (REPO / name).read_text(encoding="utf-8")


def fields_of(*classes):
    return [f for cls in classes for f in dataclasses.fields(cls) if f.default_factory is dataclasses.MISSING]


def table(*classes):
    """One README row per field."""
    texts = {}
    for cls in classes:
        texts |= attribute_texts(cls)
    return [f"| `{f.name}` | `{f.default!r}` | {texts[f.name]} |" for f in fields_of(*classes)]


def names_in_code(name):
    """What a document sets in code type."""
    return set(re.findall(r"`([^`\n]+)`", text(name)))


def engine_metric_keys():
    """The keys that `engine_metrics` returns, read from its source: an engine takes seconds to make."""
    tree = ast.parse(text("jaxinfer/engine/metrics.py"))
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "engine_metrics"]
    (returned,) = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
    assert isinstance(returned, ast.Dict)
    return [key.value for key in returned.keys if isinstance(key, ast.Constant)]


@pytest.mark.parametrize("row", [*table(SamplingParams), *table(*PARTS, EngineConfig)])
def test_readme_has_the_row_of_every_parameter_and_option(row):
    assert row in text("README.md").splitlines(), "run `python tests/test_docs.py` and paste its tables"


def test_engine_metric_keys_are_found():
    assert {"num_requests_running", "start_seconds"} <= set(engine_metric_keys())


@pytest.mark.parametrize("key", engine_metric_keys())
def test_every_metric_of_the_engine_is_documented(key):
    assert key in names_in_code("docs/metrics.md")


@pytest.mark.parametrize("key", [f.name for f in dataclasses.fields(MemoryPlan)])
def test_every_entry_of_the_memory_account_is_documented(key):
    assert f"memory.{key}" in names_in_code("docs/metrics.md")


@pytest.mark.parametrize("key", [*RequestMetrics().to_dict(), *(f.name for f in dataclasses.fields(RequestMetrics))])
def test_every_metric_of_a_request_is_documented(key):
    assert key in names_in_code("docs/metrics.md")


def test_no_metric_is_documented_that_is_not_there():
    rows = re.findall(r"^\| `([\w.]+)` \|", text("docs/metrics.md"), re.MULTILINE)
    known = {*engine_metric_keys(), *RequestMetrics().to_dict(), *(f.name for f in dataclasses.fields(RequestMetrics))}
    known |= {f"memory.{f.name}" for f in dataclasses.fields(MemoryPlan)}
    known |= {"attention.implementation", "attention.reason"}
    assert set(rows) - known == {f"start_seconds.{part}" for part in ("open", "weights", "pages", "compile")}


@pytest.mark.parametrize("cls", [SamplingParams, RequestOutput, CompletionOutput])
def test_api_names_every_field(cls):
    assert {f.name for f in dataclasses.fields(cls)} <= names_in_code("docs/api.md")


@pytest.mark.parametrize("name", ERRORS)
def test_api_names_every_error(name):
    assert name in names_in_code("docs/api.md")


@pytest.mark.parametrize(
    "name", ["README.md", "CHANGELOG.md", "docs/api.md", "docs/architecture.md", "docs/metrics.md"]
)
def test_links_lead_somewhere(name):
    for target, _ in LINK.findall(text(name)):
        assert ((REPO / name).parent / target).exists(), target


def test_python_examples_are_python_and_import_what_there_is():
    blocks = re.findall(r"```python\n(.*?)```", text("README.md") + text("docs/api.md"), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "jaxinfer":
                assert {alias.name for alias in node.names} <= {"LLM", "SamplingParams", "RequestOutput"}


if __name__ == "__main__":
    print("\n".join(table(SamplingParams)), end="\n\n")
    print("\n".join(table(*PARTS, EngineConfig)))
