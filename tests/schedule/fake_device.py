"""A device in plain Python that executes plans and checks every read; and the driver that runs a scheduler against it.

A cell of a page holds the hash of (namespace, all tokens up to its position), which is what a real key or value depends
on. A row may only read cells that hold exactly its own history, so a stale page, a wrong prefix hit or an early reuse
fails at once. The next token is a function of the history, so outputs can be compared with `oracle_tokens`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxinfer.request import Request, SamplingParams
from jaxinfer.schedule import (
    NULL_PAGE,
    Admission,
    RowTokens,
    Scheduler,
    StepPlan,
    StepTokens,
    TokenEvent,
    TokenLogprobs,
)
from jaxinfer.schedule.sequence import choice_seed

VOCAB = 50
EOS = (0, 1)
BAD = "not finite"


class BadRead(Exception):
    """A row met a cell that is not finite; its result is flagged, as the real device would."""


def next_token(history: int, seed: int, params: SamplingParams, num_outputs: int) -> int:
    """Deterministic draw; end tokens are avoided below min_tokens, unless nothing else is allowed."""
    if params.allowed_token_ids is not None:
        return params.allowed_token_ids[hash((history, seed, -1)) % len(params.allowed_token_ids)]
    banned = {*EOS, *params.stop_token_ids} if num_outputs < params.min_tokens else ()
    token = hash((history, seed, -1)) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def is_end(token: int, params: SamplingParams, num_tokens: int, max_total_tokens: int) -> bool:
    """Whether the device freezes a slot after this token."""
    ends = (token in EOS and not params.ignore_eos) or token in params.stop_token_ids
    return ends or num_tokens >= max_total_tokens


def root_history(namespace: str) -> int:
    """Where a history starts; of integers only, since the hash of a string differs between runs of Python."""
    return hash(tuple(namespace.encode()))


def extend_history(history: int, token: int) -> int:
    return hash((history, token))


def oracle_tokens(request: Request, index: int, max_total_tokens: int) -> list[int]:
    """The choice's whole answer, computed with no cache, batch or scheduler."""
    seed = choice_seed(request.seed, index)
    history = root_history(request.cache_namespace)
    for token in request.prompt_token_ids:
        history = extend_history(history, token)
    outputs: list[int] = []
    while True:
        token = next_token(history, seed, request.params, len(outputs))
        outputs.append(token)
        history = extend_history(history, token)
        num_tokens = len(request.prompt_token_ids) + len(outputs)
        if is_end(token, request.params, num_tokens, max_total_tokens):
            return outputs


@dataclass
class _Slot:
    admission: Admission
    tokens: list[int] = field(default_factory=list)
    histories: list[int] = field(default_factory=list)
    is_live: bool = True

    def append(self, token: int, root: int) -> None:
        self.histories.append(extend_history(self.histories[-1] if self.histories else root, token))
        self.tokens.append(token)


class FakeDevice:
    """Attributes:
    namespaces: cache namespace by sequence id; the test's knowledge, which a real device lacks.
    bad_seq_ids: sequences whose next row goes wrong.
    page_tables: of the last plan, by sequence id.
    """

    def __init__(self, num_pages: int, page_size: int, max_num_seqs: int):
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.pages: list[list] = [[None] * page_size for _ in range(num_pages)]
        self.slots: dict[int, _Slot] = {}
        self.host: dict[int, list[list]] = {}
        self.namespaces: dict[int, str] = {}
        self.bad_seq_ids: set[int] = set()
        self.page_tables: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> StepTokens:
        """Runs one plan, in the order `StepPlan` states."""
        for swap in plan.swap_outs:
            assert swap.seq_id not in self.host
            self.host[swap.seq_id] = [list(self.pages[page_id]) for page_id in swap.page_ids]
        for page_id in plan.scrub_page_ids:
            self.pages[page_id] = [None] * self.page_size
        for swap in plan.swap_ins:
            copies = self.host.pop(swap.seq_id)
            assert len(copies) == len(swap.page_ids)
            for page_id, cells in zip(swap.page_ids, copies, strict=True):
                self.pages[page_id] = cells
        for admission in plan.admissions:
            assert 0 <= admission.slot < self.max_num_seqs
            slot = self.slots[admission.slot] = _Slot(admission)
            for token in admission.token_ids:
                slot.append(token, self._root(admission.seq_id))
        return self._run_rows(plan)

    def _root(self, seq_id: int) -> int:
        return root_history(self.namespaces[seq_id])

    def _run_rows(self, plan: StepPlan) -> StepTokens:
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        assert plan.kind == ("mixed" if any(row.start is not None for row in plan.rows) else "decode")
        assert plan.kind == "decode" or plan.num_rounds == 1
        self.page_tables = {row.seq_id: plan.page_table[i].tolist() for i, row in enumerate(plan.rows)}
        outputs: list[list[int]] = [[] for _ in plan.rows]
        is_bad = [False] * len(plan.rows)
        for _ in range(plan.num_rounds):
            spans = [self._span(row) for row in plan.rows]
            written: set[tuple[int, int]] = set()
            for i, row in enumerate(plan.rows):  # all reads come before all writes: no row may rest on another's
                try:
                    self._check_reads(row, spans[i][0])
                except BadRead:
                    is_bad[i] = True
            for i, row in enumerate(plan.rows):
                is_bad[i] |= row.seq_id in self.bad_seq_ids
                self._write(row, spans[i], is_bad[i], written)
                if row.samples and self.slots[row.slot].is_live:
                    outputs[i].append(self._sample(row.slot))
        self.bad_seq_ids -= {row.seq_id for row in plan.rows}
        return StepTokens(
            tuple(
                RowTokens(is_bad=True) if bad else RowTokens(tuple(out), (), self._prompt_logprobs(row))
                for row, out, bad in zip(plan.rows, outputs, is_bad, strict=True)
            )
        )

    def _span(self, row) -> tuple[int, int]:
        """First position the row computes in this round, and the one past its last."""
        slot = self.slots[row.slot]
        assert slot.admission.seq_id == row.seq_id, "the slot is another sequence's"
        if row.start is None:
            assert row.num_tokens == 1
            assert row.samples
            return (len(slot.tokens) - 1, len(slot.tokens) - (not slot.is_live))
        end = row.start + row.num_tokens
        assert row.num_tokens >= 1
        assert end <= len(slot.tokens)
        assert row.samples == (end == len(slot.tokens))
        return (row.start, end)

    def _check_reads(self, row, start: int) -> None:
        slot = self.slots[row.slot]
        if not slot.is_live:
            return
        size, table = self.page_size, self.page_tables[row.seq_id]
        for index in range(-(-start // size)):
            assert table[index] != NULL_PAGE
            wanted = slot.histories[index * size : min(start, (index + 1) * size)]
            cells = self.pages[table[index]]
            if BAD in cells:
                raise BadRead
            assert cells[: len(wanted)] == wanted, f"sequence {row.seq_id} reads page {table[index]}, wrong contents"

    def _write(self, row, span: tuple[int, int], is_bad: bool, written: set) -> None:
        slot = self.slots[row.slot]
        for position in range(*span):
            page_id = self.page_tables[row.seq_id][position // self.page_size]
            cell = (page_id, position % self.page_size)
            assert page_id != NULL_PAGE, f"sequence {row.seq_id} has no page for position {position}"
            assert cell not in written, f"two rows write page {page_id}"
            written.add(cell)
            self.pages[page_id][cell[1]] = BAD if is_bad else slot.histories[position]

    def _sample(self, slot_id: int) -> int:
        slot = self.slots[slot_id]
        admission = slot.admission
        num_outputs = len(slot.tokens) - admission.num_prompt_tokens
        token = next_token(slot.histories[-1], admission.seed, admission.params, num_outputs)
        slot.append(token, 0)
        if is_end(token, admission.params, len(slot.tokens), admission.max_total_tokens):
            slot.is_live = False
        return token

    def _prompt_logprobs(self, row) -> tuple[TokenLogprobs, ...]:
        """Scores that name their position and token, so that a test can tell which were reported."""
        if not row.prompt_logprobs:
            return ()
        slot = self.slots[row.slot]
        known = slot.admission.token_ids
        positions = range(row.start + 1, min(row.start + row.num_tokens + 1, len(known)))
        return tuple(TokenLogprobs(logprob=float(-p), rank=known[p] + 1) for p in positions)


class FakeClock:
    """Attributes: now: seconds; moved by the test."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """An engine loop without an engine: one plan in flight while the next is made, or none.

    Attributes:
      outputs, reasons, events: of every sequence, by id.
      requests: (request, choice) by sequence id.
      on_event: called with every event, before the next plan is made.
    """

    def __init__(self, *, overlap: bool = True, **options):
        self.overlap = overlap
        self.clock = FakeClock()
        options = {
            "num_pages": 64,
            "page_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 128,
            "rounds_per_dispatch": 4,
            **options,
        }
        self.scheduler = Scheduler(eos_token_ids=EOS, clock=self.clock, **options)
        self.device = FakeDevice(options["num_pages"], options["page_size"], options["max_num_seqs"])
        self.in_flight: deque[tuple[StepPlan, StepTokens]] = deque()
        self.plans: list[StepPlan] = []
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.events: dict[int, list[TokenEvent]] = {}
        self.requests: dict[int, tuple[Request, int]] = {}
        self.on_event: Callable[[TokenEvent], None] = lambda event: None

    def submit(self, prompt, *, namespace: str = "", seed: int = 0, **params) -> list[int]:
        request = Request(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**params),
            seed=seed,
            arrival_time=self.clock.now,
            cache_namespace=namespace,
        )
        seq_ids = self.scheduler.submit(request)
        for index, seq_id in enumerate(seq_ids):
            self.requests[seq_id] = (request, index)
            self.outputs[seq_id] = []
            self.events[seq_id] = []
            self.device.namespaces[seq_id] = namespace
        return seq_ids

    def finish(self, seq_id: int, reason: str, num_output_tokens: int | None = None) -> None:
        self.scheduler.finish(seq_id, reason, num_output_tokens)
        if seq_id not in self.reasons:
            self.reasons[seq_id] = reason
            self.device.host.pop(seq_id, None)
            if num_output_tokens is not None:
                del self.outputs[seq_id][num_output_tokens:]

    def step(self) -> StepPlan | None:
        """Plans and issues one step, then commits what is due."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.execute(plan)))
        if self.in_flight and (plan is None or not self.overlap or len(self.in_flight) > 1):
            self.take(self.scheduler.commit(*self.in_flight.popleft()))
        return plan

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.seq_id not in self.reasons, "news of an ended sequence"
            self.outputs[event.seq_id].extend(event.token_ids)
            self.events[event.seq_id].append(event)
            if event.finish_reason is not None:
                self.reasons[event.seq_id] = event.finish_reason
                self.device.host.pop(event.seq_id, None)
            self.on_event(event)

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left to do, auditing each time."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            self.step()
            self.scheduler.audit()
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing runs, waits or holds a page."""
        assert not self.scheduler.has_work()
        self.scheduler.audit()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)
        assert not self.device.host

    def oracle(self, seq_id: int) -> list[int]:
        request, index = self.requests[seq_id]
        limit = self.scheduler.limits.max_total_tokens
        if request.params.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + request.params.max_tokens)
        return oracle_tokens(request, index, limit)

    def check_outputs(self) -> None:
        """Ended sequences have the oracle's answer, those cut short its beginning."""
        for seq_id, reason in self.reasons.items():
            wanted, got = self.oracle(seq_id), self.outputs[seq_id]
            is_whole = reason in ("stop", "length")
            assert got == (wanted if is_whole else wanted[: len(got)]), (
                f"sequence {seq_id} ({reason}): {got}, not {wanted}"
            )


def random_prompt(rng: random.Random, max_len: int) -> list[int]:
    """A prompt that often shares its beginning with others: one of four stems, then a few free tokens."""
    stem = random.Random(rng.randrange(4)).choices(range(2, VOCAB), k=max_len)
    num_stem = rng.randint(0, max_len - 1)
    tail = rng.choices(range(2, VOCAB), k=rng.randint(1, max(1, min(6, max_len - num_stem))))
    return (stem[:num_stem] + tail)[:max_len]
