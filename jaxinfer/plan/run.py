"""Makes a plan: reads the architecture, lays the engine out on the target, compiles its programs, predicts steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from jaxinfer.config import EngineConfig, cache_folder
from jaxinfer.engine.layout import Layout, abstract_model, lay_out, shard_bytes, weight_dtype
from jaxinfer.errors import ConfigError
from jaxinfer.model import Architecture, MeshRules
from jaxinfer.plan.compile import ProgramReport, choose_programs, compile_programs
from jaxinfer.plan.fit import Fit, Room, fit_of, rooms, sequences_that_fit
from jaxinfer.plan.model_sizes import read_architecture
from jaxinfer.plan.options import Command
from jaxinfer.plan.roofline import Prediction, StepCosts, predict, prompt
from jaxinfer.plan.targets import Target, find_target
from jaxinfer.step import CompileCounter
from jaxinfer.step.weight_order import choose_weight_order

ROWS = (1, 8, 32, 128)  # and as many as there are slots
CONTEXTS = (1024, 8192)
PROMPTS = (512, 2048, 8192)
TENSOR_PARALLEL_SIZES = (2, 4, 8, 16, 32)  # tried when one size does not fit


@dataclass(frozen=True)
class DecodeStep:
    """A predicted decode step.

    Attributes:
      is_room: the pool holds so many sequences of that length, and there are so many slots.
    """

    rows: int
    context: int
    is_room: bool
    prediction: Prediction

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.prediction.seconds


@dataclass(frozen=True)
class Prefill:
    """A predicted prefill of one prompt alone."""

    tokens: int
    prediction: Prediction

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.prediction.seconds


@dataclass(frozen=True)
class Plan:
    """Everything a plan says.

    Attributes:
      source: the model's file.
      usable_bytes: of one device.
      programs: those that were compiled, or failed to.
      decode, prefill: empty where the chip's figures are not known.
    """

    config: EngineConfig
    source: str
    target: Target
    usable_bytes: int
    layout: Layout
    programs: list[ProgramReport]
    fit: Fit
    rooms: list[Room]
    decode: list[DecodeStep]
    prefill: list[Prefill]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(a.shape) for a in self.layout.leaves)

    @property
    def num_failed(self) -> int:
        """Programs that do not compile."""
        return sum(not report.is_compiled for report in self.programs)

    @property
    def works(self) -> bool:
        """All programs compile, and everything fits."""
        return not self.num_failed and self.fit.is_enough


def make_plan(
    command: Command,
    config: EngineConfig,
    on_program: Callable[[ProgramReport | None, int], None] = lambda report, total: None,
) -> Plan:
    """Does what the command line says.

    Args:
      on_program: called with None before the first program, then with each one's report when it is there, and with how
        many there will be.

    Raises:
      JaxInferError: the model, the target or an option is wrong, or one sequence does not fit.
    """
    arch, source = read_architecture(config.model.model)
    num_devices = config.parallel.tensor_parallel_size
    target = find_target(command.target, num_devices)
    rules = MeshRules(target.mesh(num_devices))
    usable = target.usable_bytes()
    try:
        layout = _lay_out(config, arch, rules, usable)
    except ConfigError as why:
        raise ConfigError(f"{why}{_advice(config, arch, target)}") from why
    programs = layout.programs(CompileCounter())
    keys = choose_programs(command.programs, programs.keys())
    on_program(None, len(keys))
    reports = compile_programs(programs, keys, command.threads, lambda report: on_program(report, len(keys)))
    costs, dtype = StepCosts.of(layout), layout.dtype
    return Plan(
        config=config,
        source=source,
        target=target,
        usable_bytes=usable,
        layout=layout,
        programs=reports,
        fit=fit_of(layout, usable, config.cache.memory_utilization, reports),
        rooms=rooms(layout),
        decode=_decode_steps(command, layout, costs, target, dtype),
        prefill=_prefills(layout, costs, target, dtype),
    )


def _lay_out(config: EngineConfig, arch: Architecture, rules: MeshRules, usable: int) -> Layout:
    dtype = weight_dtype(config.model.dtype, rules)
    platform = rules.mesh.devices.flat[0].platform
    order = choose_weight_order(arch, dtype, cache_folder() / "weight_order.json") if platform == "cpu" else "in_out"
    params = abstract_model(arch, order, dtype, rules)
    if platform == "cpu":
        # The engine asks what is free when the weights are already there.
        usable = max(0, usable - sum(shard_bytes(a) for a in jax.tree.leaves((params.top, params.layers))))
    return lay_out(config, arch, params, rules, usable)


def _advice(config: EngineConfig, arch: Architecture, target: Target) -> str:
    """The least number of chips of this kind that would do, to add to an error about memory."""
    if target.is_local:
        return ""
    asked, chip = config.parallel.tensor_parallel_size, target.chip
    most = TENSOR_PARALLEL_SIZES[-1] if chip.num_dims else chip.host_chips  # GPUs of one machine
    for size in (size for size in TENSOR_PARALLEL_SIZES if asked < size <= most):
        larger = find_target(chip.name, size)
        parallel = replace(config.parallel, tensor_parallel_size=size)
        try:
            _lay_out(replace(config, parallel=parallel), arch, MeshRules(larger.mesh(size)), larger.usable_bytes())
        except ConfigError:
            continue
        return f"; it fits with --tensor-parallel-size {size} --target {larger.name}"
    return ""


def _decode_steps(command: Command, layout: Layout, costs: StepCosts, target: Target, dtype: str) -> list[DecodeStep]:
    slots, longest = layout.sizes.num_slots, layout.sizes.max_model_len
    rows = command.rows or sorted({*(n for n in ROWS if n < slots), slots})
    contexts = command.contexts or sorted({min(context, longest) for context in CONTEXTS})
    steps = []
    for context in contexts:
        by_pages = sequences_that_fit(layout.sizes.num_pages, layout.page_format.page_size, context)
        for num_rows in rows:
            prediction = predict(costs.decode(num_rows, context), target.chip, dtype)
            if prediction is not None:
                is_room = num_rows <= min(by_pages, slots) and context <= longest
                steps.append(DecodeStep(num_rows, context, is_room, prediction))
    return steps


def _prefills(layout: Layout, costs: StepCosts, target: Target, dtype: str) -> list[Prefill]:
    longest = layout.sizes.max_model_len
    found = []
    for tokens in sorted({min(tokens, longest) for tokens in PROMPTS}):
        prediction = prompt(costs, tokens, target.chip, dtype)
        if prediction is not None:
            found.append(Prefill(tokens, prediction))
    return found
