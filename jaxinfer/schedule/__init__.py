"""Host side scheduling: which sequence computes which tokens in which pages. No jax here."""

from jaxinfer.schedule.scheduler import Scheduler
from jaxinfer.schedule.step_plan import (
    NULL_PAGE,
    Admission,
    PlannedRow,
    RowTokens,
    SchedulerStats,
    StepPlan,
    StepTokens,
    SwapIn,
    SwapOut,
    TokenEvent,
    TokenLogprobs,
)

__all__ = [
    "NULL_PAGE",
    "Admission",
    "PlannedRow",
    "RowTokens",
    "Scheduler",
    "SchedulerStats",
    "StepPlan",
    "StepTokens",
    "SwapIn",
    "SwapOut",
    "TokenEvent",
    "TokenLogprobs",
]
