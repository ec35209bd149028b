"""Compiles one kernel in a process of its own: where compilers write their dumps is read once, at process start.

    python -m kernel_model.compile_one '{"kernel": "jax", "target": "v5e", "workload": {...}, "folder": ...}'

The folder then holds `facts.json`, and `operands.npz`: the integers that the compiled kernel is given, by
"<pallas call>/<kernel's name>/<operand>". They are worked out on this machine from the program itself, up to the call.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.plan.targets import find_target

from .kernels import CannotRun, build
from .shapes import Workload

UNKNOWN = object()  # an array whose values are not known


def pallas_operands(jaxpr: jex.ClosedJaxpr, known: Sequence[Any]) -> list[tuple[str, dict[int, np.ndarray]]]:
    """(name, integer operands by position) of every Pallas call, in order, as far as they follow from `known`.

    Args:
      known: the program's arguments; `UNKNOWN` where there are no values.
    """
    found: list[tuple[str, dict[int, np.ndarray]]] = []
    _run(jaxpr.jaxpr, list(jaxpr.consts), list(known), found)
    return found


def _run(jaxpr, consts, args, found) -> list[Any]:
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(var):
        return var.val if isinstance(var, jex.Literal) else env.get(var, UNKNOWN)

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name == "pallas_call":
            integers = {
                i: np.asarray(v)
                for i, v in enumerate(values)
                if v is not UNKNOWN and np.issubdtype(np.asarray(v).dtype, np.integer)
            }
            found.append((_name_of(eqn), integers))
            results: list[Any] = [UNKNOWN] * len(eqn.outvars)
        elif eqn.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"):
            assert inner is not None, eqn.primitive
            results = _run(inner.jaxpr, inner.consts, values, found)
        elif any(v is UNKNOWN for v in values):
            results = [UNKNOWN] * len(eqn.outvars)
        else:
            results = _evaluate(jaxpr, eqn, env)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _evaluate(jaxpr, eqn, env) -> list[Any]:
    """One equation on this machine."""
    inputs = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jex.Literal)))
    alone = jaxpr.replace(constvars=[], invars=inputs, outvars=list(eqn.outvars), eqns=[eqn])
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, []))(*(env[v] for v in inputs))


def _name_of(eqn) -> str:
    info = eqn.params.get("name_and_src_info")
    return info.name if info is not None else eqn.params["name"]


def compile_one(spec: dict[str, Any]) -> dict[str, Any]:
    """Compiles, writes the operands, and returns the facts."""
    folder = Path(spec["folder"])
    target = find_target(spec["target"])
    try:
        program = build(spec["kernel"], Workload(**spec["workload"]), target.chip, spec.get("block_sizes"))
    except CannotRun as why:
        return {"refused": str(why)}
    mesh = target.mesh()
    place = NamedSharding(mesh, PartitionSpec())
    arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), program.arrays)
    numbers = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in program.numbers]
    try:
        with jax.set_mesh(mesh):
            jaxpr = jax.make_jaxpr(program.function)(*program.arrays, *program.numbers)
            compiled = jax.jit(program.function).lower(*arrays, *numbers).compile()
    except Exception as why:  # whatever the kernel or the compiler raises is a result of the report, not an error of it
        traceback.print_exc()
        return {"refused": f"{type(why).__name__}: {why}"}
    known = [*([UNKNOWN] * len(jax.tree.leaves(program.arrays))), *program.numbers]
    calls = pallas_operands(jaxpr, known)
    np.savez(
        folder / "operands.npz",
        **{f"{n}/{name}/{i}": v for n, (name, values) in enumerate(calls) for i, v in values.items()},  # pyright: ignore
    )
    memory = compiled.memory_analysis()
    return {
        "notes": program.notes,
        "calls": [name for name, _ in calls],
        "device": target.devices()[0].device_kind,
        "temporary_bytes": memory.temp_size_in_bytes if memory else None,
        "hlo": compiled.as_text(),
    }


def main() -> None:
    spec = json.loads(sys.argv[1])
    facts = compile_one(spec)
    (Path(spec["folder"]) / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
