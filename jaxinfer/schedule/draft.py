"""A plan while it is being made: who takes part, which state and pages move. `freeze` turns it into a `StepPlan`."""

from __future__ import annotations

import numpy as np

from jaxinfer.schedule.sequence import Sequence
from jaxinfer.schedule.state import SchedulerState
from jaxinfer.schedule.step_plan import NULL_PAGE, Admission, PlannedRow, StepPlan, SwapIn, SwapOut


class Draft:
    """Attributes:
    decodes: sequences that take decode rounds, by id.
    chunks: (sequence, number of tokens) of each prefill chunk, by id.
    num_rounds: of the decode rows.
    was_short: whether a sequence lost its pages to another: nothing is admitted then.
    """

    def __init__(self, step_id: int, token_budget: int):
        self.step_id = step_id
        self.token_budget = token_budget
        self.decodes: dict[int, Sequence] = {}
        self.chunks: dict[int, tuple[Sequence, int]] = {}
        self.admissions: list[Admission] = []
        self.swap_outs: list[SwapOut] = []
        self.swap_ins: list[SwapIn] = []
        self.num_rounds = 1
        self.was_short = False

    @property
    def num_query_tokens(self) -> int:
        return len(self.decodes) + sum(count for _, count in self.chunks.values())

    @property
    def budget_left(self) -> int:
        return self.token_budget - self.num_query_tokens

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the device to do. Scrubs can wait for the next plan."""
        return not (self.decodes or self.chunks or self.swap_outs)

    def drop(self, seq: Sequence) -> None:
        """Takes a sequence's row out again: it is being preempted."""
        self.decodes.pop(seq.seq_id, None)
        self.chunks.pop(seq.seq_id, None)

    def admit(self, seq: Sequence) -> None:
        """Has the sequence's state written into its slot."""
        assert seq.slot is not None
        self.admissions.append(
            Admission(
                slot=seq.slot,
                seq_id=seq.seq_id,
                token_ids=tuple(seq.tokens),
                num_prompt_tokens=seq.num_prompt_tokens,
                max_total_tokens=seq.max_total_tokens,
                params=seq.params,
                seed=seq.seed,
                bad_word_ids=seq.request.bad_word_ids,
            )
        )

    def freeze(self, state: SchedulerState) -> StepPlan:
        """Makes the plan and counts it as issued in each sequence."""
        rows: list[PlannedRow] = []
        members = [*self.decodes.values(), *(seq for seq, _ in self.chunks.values())]
        table = np.full((len(members), state.limits.table_width), NULL_PAGE, np.int32)
        for index, seq in enumerate(members):
            assert seq.slot is not None
            table[index, : len(seq.page_ids)] = np.frombuffer(seq.page_ids, np.int32)
            if seq.seq_id in self.decodes:
                rows.append(PlannedRow(seq.seq_id, seq.slot, None, 1, True))
                seq.num_kv += min(self.num_rounds, seq.num_rounds_left)
            else:
                rows.append(_chunk_row(seq, seq.slot, self.chunks[seq.seq_id][1]))
                seq.num_kv += rows[-1].num_tokens
            seq.num_in_flight += 1
        return StepPlan(
            step_id=self.step_id,
            kind="mixed" if self.chunks else "decode",
            rows=tuple(rows),
            page_table=table,
            num_rounds=self.num_rounds,
            admissions=tuple(self.admissions),
            swap_outs=tuple(self.swap_outs),
            swap_ins=tuple(self.swap_ins),
            scrub_page_ids=state.pool.take_scrubs(),
        )


def _chunk_row(seq: Sequence, slot: int, num_tokens: int) -> PlannedRow:
    end = seq.num_kv + num_tokens
    last_reported = min(end, seq.num_prompt_tokens - 1)  # this chunk scores positions num_kv + 1 .. end
    wants_logprobs = seq.params.prompt_logprobs is not None and last_reported >= max(
        seq.num_kv + 1, seq.num_prompt_logprobs
    )
    return PlannedRow(seq.seq_id, slot, seq.num_kv, num_tokens, end == seq.prefill_target, wants_logprobs)
