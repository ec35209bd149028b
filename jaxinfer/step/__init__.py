"""The compiled programs: the only place that calls jax.jit."""

from jaxinfer.step.compiled import CompileCounter, Programs, ProgramSizes
from jaxinfer.step.memory import MemoryPlan, plan_memory
from jaxinfer.step.runner import PendingStep, Runner

__all__ = ["CompileCounter", "MemoryPlan", "PendingStep", "ProgramSizes", "Programs", "Runner", "plan_memory"]
