"""The loop: plan, issue, read the step before, tell.

    plan n+1 ─► submit n+1 ─► (device runs n) ─► collect n ─► commit n ─► outputs

One program is always queued ahead of the host: while the device runs step n+1 the host reads and commits step n and
plans n+2. One thread only; a server runs it in a thread of its own and talks to it through queues.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.engine.output import OutputBoard
from jaxinfer.errors import EngineDead
from jaxinfer.request import Request, RequestOutput
from jaxinfer.schedule.scheduler import Scheduler
from jaxinfer.step import PendingStep, Runner
from jaxinfer.text import Tokenizer

MAX_IN_FLIGHT = 2


@dataclass
class LoopStats:
    """Seconds since start.

    Attributes:
      busy_seconds: time inside `step` with work to do.
      host_seconds: `busy_seconds` less the time spent waiting for the device.
    """

    busy_seconds: float = 0.0
    host_seconds: float = 0.0


class Engine:
    """Requests in, outputs out.

    Attributes:
      scheduler, runner: the host's and the device's half.
      stats: see `LoopStats`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Takes both halves; `max_in_flight` is 2 for overlap, 1 for strictly one step after another."""
        self.scheduler = scheduler
        self.runner = runner
        self.stats = LoopStats()
        self._clock = clock
        self._max_in_flight = max_in_flight
        self._in_flight: deque[PendingStep] = deque()
        self._board = OutputBoard(tokenizer, scheduler.finish)
        self._failure: BaseException | None = None

    def submit(self, request: Request, prompt: str | None = None) -> None:
        """Queues a request.

        Args:
          prompt: its text, for the output record.

        Raises:
          PromptTooLong: it could never run.
          QueueFull: too many wait.
          EngineDead: an earlier step failed and took the device's state with it.
        """
        if self._failure is not None:
            raise EngineDead("the engine stopped when a step failed; make a new one") from self._failure
        self._board.add(request, prompt, self.scheduler.submit(request))

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; its slot and pages are free for the next plan. None when it is not live."""
        for seq_id in self._board.seq_ids(request_id):
            self.scheduler.finish(seq_id, "abort")
        return self._board.abort(request_id, "abort", self._clock())

    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return self.scheduler.has_work()

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests so far."""
        return self._board.num_output_tokens

    def live_request_ids(self) -> list[str]:
        """Unfinished requests, oldest first."""
        return self._board.live_request_ids()

    def step(self) -> list[RequestOutput]:
        """One turn of the loop; returns the outputs that changed. They are live records, complete when `finished`."""
        start, waited = time.perf_counter(), self.runner.stats.wait_seconds
        try:
            return self._turn()
        except BaseException as failure:
            # Pages and slots were donated to the failed program: nothing on the device can be trusted any more.
            self._failure = failure
            raise
        finally:
            busy = time.perf_counter() - start
            self.stats.busy_seconds += busy
            self.stats.host_seconds += busy - (self.runner.stats.wait_seconds - waited)

    def _turn(self) -> list[RequestOutput]:
        events = self.scheduler.expire(self._clock())
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self.runner.submit(plan))
        if len(self._in_flight) >= self._max_in_flight or (plan is None and self._in_flight):
            pending = self._in_flight.popleft()
            events += self.scheduler.commit(pending.plan, self.runner.collect(pending))
        outputs = self._board.apply(events, self._clock())
        if self.runner.num_swapped:
            self.runner.forget_swapped(self.scheduler.is_live)
        return outputs
