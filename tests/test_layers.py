"""The layers, the ceilings and the bans of the style, checked on the syntax tree of every source file.

A rule looks at one file, given as its path and its text, and yields what is wrong; so a planted violation is one line
of `MUTANTS`, and each rule has at least one. The last tests start every command.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxinfer", "pallas_kernels", "checkpoints")

COMMANDS = ("serve", "bench", "evaluate", "quantize", "plan", "convert", "fetch", "native", "generate")
LAYERS = (
    ("config", "errors", "request", "version"),
    ("text", "schedule", "observe", "quant", "flags"),
    ("model", "sampling"),
    ("speculate",),
    ("step",),
    ("engine",),
    COMMANDS,
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TOP = len(LAYERS)  # jaxinfer/__init__.py
HOST = ("text", "schedule", "observe", "flags")  # beside rank 0, which may not import anything anyway
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "chex", "optax", "orbax", "aqt", "pallas_kernels"}
SERIALIZERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
MACHINE_PATH = re.compile(r"(?<![\w.>}])/(?:work|home|root|Users)/")

MAX_FILE_LINES = 400
MAX_KERNEL_FILE_LINES = 800
MAX_FUNCTION_LINES = 60  # the docstring is not counted: to document is never a fault

# Exceptions, each with its reason. Keep both short.
LONG_FUNCTIONS: dict[str, str] = {}  # "path:function": why it cannot be divided
IMPORTS_IN_FUNCTIONS: dict[str, str] = {}  # path: the optional hardware library that may be absent


@dataclass(frozen=True)
class Source:
    """One file: its path from the repository's root, its text, its tree, and the modules it imports as (line, name)."""

    path: str
    text: str
    tree: ast.Module
    imports: tuple[tuple[int, str], ...]

    @staticmethod
    def parse(path: str, text: str) -> Source:
        tree = ast.parse(text)
        return Source(path, text, tree, tuple(_imports(path, tree)))

    @property
    def layer(self) -> str | None:
        """Folder or file of `jaxinfer` it belongs to; `__init__` for the package's own; None outside `jaxinfer`."""
        parts = Path(self.path).with_suffix("").parts
        return parts[1] if parts[0] == "jaxinfer" else None


def _imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every import anywhere in the file, as `package.module.name` for `from package.module import name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = [*Path(path).parts[: -node.level], *base]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def imports_point_down(source: Source) -> Iterator[str]:
    if source.layer is None:
        return
    rank = TOP if source.layer == "__init__" else RANKS.get(source.layer)
    if rank is None:
        yield f"jaxinfer/{source.layer} has no rank; give it one in tests/test_layers.py"
        return
    for line, name in source.imports:
        package, _, rest = name.partition(".")
        if package != "jaxinfer":
            if rank == 0 and package not in sys.stdlib_module_names:
                yield f"line {line}: rank 0 imports {package}; it may use the standard library alone"
            continue
        other = rest.partition(".")[0]
        other_rank = RANKS.get(other, TOP)
        if other != source.layer and not (other_rank < rank or other_rank == rank == 0):
            yield f"line {line}: {source.layer} (rank {rank}) imports {name} (rank {other_rank}); imports point down"


def leaves_stand_alone(source: Source) -> Iterator[str]:
    package = Path(source.path).parts[0]
    for line, name in source.imports:
        other = name.partition(".")[0]
        if package != "jaxinfer" and other in PACKAGES and other != package:
            yield f"line {line}: the leaf {package} imports {other}"
        if other in ("tests", "scripts"):
            yield f"line {line}: imports {other}, which is not installed"


def host_code_has_no_device_library(source: Source) -> Iterator[str]:
    if source.layer in HOST or RANKS.get(source.layer or "") == 0:
        for line, name in source.imports:
            if name.partition(".")[0] in DEVICE_LIBRARIES:
                yield f"line {line}: host code imports {name}"


def only_step_compiles(source: Source) -> Iterator[str]:
    if source.layer == "step":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("jit", "pjit", "pmap"):
            yield f"line {node.lineno}: {ast.unparse(node)}; only jaxinfer/step compiles"
    for line, name in source.imports:
        if name in ("jax.jit", "jax.pmap", "flax.nnx.jit") or name.startswith("jax.experimental.pjit"):
            yield f"line {line}: {name}; only jaxinfer/step compiles"


def only_one_file_imports_aqt(source: Source) -> Iterator[str]:
    for line, name in source.imports:
        if name.partition(".")[0] == "aqt" and source.path != "jaxinfer/quant/aqt.py":
            yield f"line {line}: only jaxinfer/quant/aqt.py imports aqt"


def imports_stand_at_the_top(source: Source) -> Iterator[str]:
    lazy = Path(source.path).name in ("__main__.py", "__init__.py") or source.path in IMPORTS_IN_FUNCTIONS
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not lazy:
            for inner in ast.walk(node):
                if isinstance(inner, (ast.Import, ast.ImportFrom)):
                    yield f"line {inner.lineno}: import inside {node.name}"
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node).endswith("TYPE_CHECKING"):
            yield f"line {node.lineno}: TYPE_CHECKING hides an edge"


def sizes_are_below_the_ceilings(source: Source) -> Iterator[str]:
    kernels = source.path.startswith("pallas_kernels/")
    ceiling = MAX_KERNEL_FILE_LINES if kernels else MAX_FILE_LINES
    num_lines = len(source.text.splitlines())
    if num_lines > ceiling:
        yield f"{num_lines} lines; the ceiling is {ceiling}"
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = _lines(node) - (_lines(node.body[0]) if ast.get_docstring(node) else 0)
            if num_lines > MAX_FUNCTION_LINES and f"{source.path}:{node.name}" not in LONG_FUNCTIONS:
                yield f"line {node.lineno}: {node.name} has {num_lines} lines; the ceiling is {MAX_FUNCTION_LINES}"


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def nothing_banned_is_used(source: Source) -> Iterator[str]:
    for line, name in source.imports:
        if name.partition(".")[0] in SERIALIZERS:
            yield f"line {line}: {name} can run code from a file"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global; state is passed"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {word.arg for word in node.keywords}
            if called in ("eval", "exec", "torch.load", "yaml.load") or "allow_pickle" in keywords:
                yield f"line {node.lineno}: {called} can run code from its argument"


def only_config_reads_the_environment(source: Source) -> Iterator[str]:
    if source.path == "jaxinfer/config.py":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            yield f"line {node.lineno}: {ast.unparse(node)}; only jaxinfer/config.py reads the environment"


def module_has_a_docstring(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield "the module has no docstring"


def machine_paths(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield f"line {number}: a path of one machine: {line.strip()}"


RULES = (
    imports_point_down,
    leaves_stand_alone,
    host_code_has_no_device_library,
    only_step_compiles,
    only_one_file_imports_aqt,
    imports_stand_at_the_top,
    sizes_are_below_the_ceilings,
    nothing_banned_is_used,
    only_config_reads_the_environment,
    module_has_a_docstring,
)
SOURCES = sorted(path.relative_to(REPO).as_posix() for package in PACKAGES for path in (REPO / package).rglob("*.py"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule):
    found = []
    for path in SOURCES:
        source = Source.parse(path, (REPO / path).read_text(encoding="utf-8"))
        found += [f"{path}: {problem}" for problem in rule(source)]
    assert not found, "\n" + "\n".join(found)


def test_no_file_names_a_path_of_one_machine():
    patterns = (
        "*.md",
        "*.toml",
        "Makefile",
        ".ci/*",
        "docs/**/*.md",
        "scripts/**/*.py",
        "scripts/**/*.sh",
        "tests/**/*.py",
    )
    others = [path for pattern in patterns for path in REPO.glob(pattern)]
    found = []
    for path in [*(REPO / name for name in SOURCES), *others]:
        found += [f"{path.relative_to(REPO)}: {problem}" for problem in machine_paths(path.read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


def test_exceptions_are_still_needed():
    for entry in LONG_FUNCTIONS:
        path, _, name = entry.partition(":")
        assert f"def {name}(" in (REPO / path).read_text(encoding="utf-8"), entry
    for path in IMPORTS_IN_FUNCTIONS:
        assert (REPO / path).is_file(), path


LONG_BODY = "\n".join(["def f():", *["    x = 1"] * MAX_FUNCTION_LINES])
MUTANTS = [
    ("imports_point_down", "jaxinfer/schedule/x.py", "from jaxinfer.engine.loop import Loop"),
    ("imports_point_down", "jaxinfer/schedule/x.py", "import jaxinfer.step"),
    ("imports_point_down", "jaxinfer/schedule/x.py", "from jaxinfer import text"),
    ("imports_point_down", "jaxinfer/schedule/x.py", "from jaxinfer import LLM"),
    ("imports_point_down", "jaxinfer/schedule/x.py", "from ..text import tokenizer"),
    ("imports_point_down", "jaxinfer/schedule/x.py", "from .. import model"),
    ("imports_point_down", "jaxinfer/schedule/x.py", "def f():\n    import jaxinfer.model.decoder"),
    ("imports_point_down", "jaxinfer/serve/x.py", "from jaxinfer.generate import main"),
    ("imports_point_down", "jaxinfer/config.py", "import numpy"),
    ("imports_point_down", "jaxinfer/request.py", "from jaxinfer.text import tokenizer"),
    ("imports_point_down", "jaxinfer/new_folder/x.py", "import os"),
    ("leaves_stand_alone", "pallas_kernels/x/api.py", "from jaxinfer.errors import ConfigError"),
    ("leaves_stand_alone", "checkpoints/x.py", "import jaxinfer"),
    ("leaves_stand_alone", "checkpoints/x.py", "import pallas_kernels"),
    ("leaves_stand_alone", "jaxinfer/model/x.py", "from tests.oracle import run"),
    ("host_code_has_no_device_library", "jaxinfer/text/x.py", "import jax.numpy as jnp"),
    ("host_code_has_no_device_library", "jaxinfer/schedule/x.py", "from flax import nnx"),
    ("host_code_has_no_device_library", "jaxinfer/observe/x.py", "from pallas_kernels import dispatch"),
    ("only_step_compiles", "jaxinfer/model/x.py", "import jax\nf = jax.jit(g)"),
    (
        "only_step_compiles",
        "jaxinfer/engine/x.py",
        "import jax, functools\nf = functools.partial(jax.jit, donate_argnums=0)",
    ),
    ("only_step_compiles", "pallas_kernels/x.py", "from jax import jit"),
    ("only_one_file_imports_aqt", "jaxinfer/quant/x.py", "from aqt.jax.v2 import aqt_quantizer"),
    ("imports_stand_at_the_top", "jaxinfer/model/x.py", "def f():\n    import os"),
    (
        "imports_stand_at_the_top",
        "jaxinfer/model/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import os",
    ),
    ("sizes_are_below_the_ceilings", "jaxinfer/model/x.py", "\n" * 401),
    ("sizes_are_below_the_ceilings", "pallas_kernels/x/tpu.py", "\n" * 801),
    ("sizes_are_below_the_ceilings", "jaxinfer/model/x.py", LONG_BODY),
    ("nothing_banned_is_used", "checkpoints/x.py", "import pickle"),
    ("nothing_banned_is_used", "checkpoints/x.py", "from dill import loads"),
    ("nothing_banned_is_used", "checkpoints/x.py", "import numpy as np\nnp.load(f, allow_pickle=True)"),
    ("nothing_banned_is_used", "jaxinfer/text/x.py", "eval('1')"),
    ("nothing_banned_is_used", "jaxinfer/text/x.py", "def f():\n    global x\n    x = 1"),
    ("only_config_reads_the_environment", "jaxinfer/engine/x.py", "import os\nx = os.environ['X']"),
    ("module_has_a_docstring", "jaxinfer/text/x.py", "x = 1"),
]
ALLOWED = [
    ("jaxinfer/__init__.py", "def __getattr__(name):\n    from jaxinfer.engine import LLM\n    return LLM"),
    ("jaxinfer/generate/__main__.py", "def main():\n    from jaxinfer.engine import LLM"),
    ("jaxinfer/step/x.py", "import jax\nfrom jaxinfer.model import decoder\nf = jax.jit(decoder.run)"),
    ("jaxinfer/config.py", "import os\nfrom jaxinfer.errors import ConfigError\nx = os.environ.get('X')"),
    ("jaxinfer/quant/aqt.py", "import aqt.jax.v2"),
    (
        "jaxinfer/model/x.py",
        "import jax\nfrom pallas_kernels import dispatch\nfrom .norms import rms\nx = jax.eval_shape(f)",
    ),
    ("pallas_kernels/x/tpu.py", "\n" * 500),
    (
        "jaxinfer/model/x.py",
        LONG_BODY.replace("    x = 1", f'    """{"a line" + chr(10)}{chr(10) * 90}"""', 1)[: -len("    x = 1")],
    ),
]


@pytest.mark.parametrize(("rule_name", "path", "text"), MUTANTS)
def test_planted_violation_is_found(rule_name, path, text):
    (rule,) = [rule for rule in RULES if rule.__name__ == rule_name]
    if rule_name != "module_has_a_docstring":
        text = '"""Doc."""\n' + text
    assert list(rule(Source.parse(path, text)))


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_what_is_allowed_is_let_through(path, text):
    source = Source.parse(path, '"""Doc."""\n' + text)
    assert [problem for rule in RULES for problem in rule(source)] == []


def test_every_rule_has_a_mutant():
    assert {rule.__name__ for rule in RULES} == {rule_name for rule_name, _, _ in MUTANTS}


def test_planted_path_is_found():
    assert list(machine_paths("x = '/ho" + "me/me/model.gguf'"))
    assert not list(machine_paths("GET /v1/models; ~/.cache/jaxinfer; https://example.org/home/x"))


@pytest.mark.parametrize("command", [path.parent.name for path in sorted((REPO / "jaxinfer").glob("*/__main__.py"))])
def test_command_answers_help_without_importing_jax(command):
    line = [sys.executable, "-X", "importtime", "-m", f"jaxinfer.{command}", "--help"]
    done = subprocess.run(line, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage" in done.stdout.lower()
    assert not re.search(r"\| +jax$", done.stderr, re.MULTILINE), "--help imports jax; import it after parsing"
