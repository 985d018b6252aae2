"""One request while it lives in the engine: what is computed, what it holds, what it has cost.

Knows the state of one request; refuses to know the pools, the queues and the other requests.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from scheduler_engine.events import Finished, FinishReason, RequestCounters
from scheduler_engine.fairness import Account
from scheduler_engine.metering import Tab
from scheduler_engine.plan import DecodingSequence
from scheduler_engine.request import Request
from scheduler_engine.waits import WaitLog

NEVER_US = 1 << 62


class State(enum.IntEnum):
    """Where a request stands. PREFILL and DECODE hold a slot; those and HELD own device blocks."""

    WAITING = 0  # never started
    PREFILL = 1
    DECODE = 2
    HELD = 3  # KV stays on the device, no slot
    SAVING = 4  # blocks fenced until their copy to the host has completed
    ON_HOST = 5
    DROPPED = 6  # KV gone, computed again on resume


IN_SLOT = (State.PREFILL, State.DECODE)
ON_DEVICE = (State.PREFILL, State.DECODE, State.HELD)
IN_LINE = (State.WAITING, State.HELD, State.ON_HOST, State.DROPPED)
SUSPENDED = (State.HELD, State.SAVING, State.ON_HOST, State.DROPPED)
WITHOUT_KV = (State.WAITING, State.DROPPED)
_WAITING = State.WAITING


class LiveRequest:
    """Always: ``computed <= total``, ``len(block_table) * block_size >= computed`` in PREFILL, DECODE and HELD, and the
    order key ``(suspended first, relegated last, deadline, arrival, sequence number)`` changes in no queue.
    """

    __slots__ = (
        "_computed",
        "account",
        "arrival_us",
        "block_table",
        "blocked_since_us",
        "bypasses",
        "cached_tokens",
        "check_clock",
        "check_total",
        "completion_deadline_us",
        "computed_at_start",
        "computed_high",
        "deadline_us",
        "debtor",
        "edge_clock",
        "estimated_gpu_us",
        "estimated_total",
        "failures",
        "finish_total",
        "first_start_us",
        "first_token_us",
        "granted_step",
        "hard_deadline_us",
        "host_blocks",
        "is_promised",
        "is_relegated",
        "limit_total",
        "num_holds",
        "num_preemptions",
        "num_published",
        "num_recomputes",
        "num_steps_without_token",
        "num_swaps",
        "offset",
        "output_ids",
        "peak_base",
        "peak_finish",
        "predicted_wait_us",
        "prefix_keys",
        "prompt_len",
        "queue_wait_limit_us",
        "rank",
        "recomputed_tokens",
        "request",
        "request_id",
        "sampling",
        "sequence",
        "sequence_number",
        "started_step",
        "state",
        "stop_ids",
        "suspended_step",
        "swapped_blocks",
        "tab",
        "ticket",
        "waits",
    )

    def __init__(self, request: Request, account: Account, *, sequence_number: int, arrival_us: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.account = account
        self.rank = int(request.priority_class)
        self.sequence_number = sequence_number
        self.arrival_us = arrival_us
        self.deadline_us = NEVER_US  # to the first token, soft: it orders
        self.hard_deadline_us: int | None = None
        self.completion_deadline_us: int | None = None
        self.is_relegated = self.is_promised = False  # will miss its soft deadline; came back at the time it was told
        self.queue_wait_limit_us: int | None = None
        self.sampling = request.sampling
        self.stop_ids = frozenset(request.stop_token_ids)
        self.state = State.WAITING
        self.prefix_keys = request.prefix_keys  # those of its output too, as blocks of it fill
        self.block_table: list[int] = []
        self.host_blocks: list[int] = []
        self.output_ids: list[int] = list(request.delivered_token_ids)
        self.prompt_len = len(request.prompt_token_ids)
        self.limit_total = self.prompt_len + request.max_tokens  # ends here with LENGTH, at the latest
        self.finish_total = self.limit_total
        self.estimated_total = self.limit_total
        self._computed: int | None = 0  # None while it decodes
        self.cached_tokens = self.num_published = 0  # found in the cache at the first start; blocks it was told of
        self.computed_high = self.prompt_len if self.output_ids else 0  # an earlier attempt computed it
        self.sequence: DecodingSequence  # once it decodes
        self.offset = self.check_clock = self.edge_clock = 0  # while it is seated: ``RunningSet``
        self.check_total = 0  # look closer once it has so many tokens: a limit or an estimate
        self.tab = Tab(account.meter)
        self.ticket = 0
        self.estimated_gpu_us = 0
        self.predicted_wait_us = 0
        self.bypasses = 0
        self.blocked_since_us: int | None = None
        self.peak_finish = self.peak_base = 0
        self.computed_at_start = 0  # or before that, where it has to compute once more what it lost
        self.started_step = -1
        self.suspended_step = -1
        self.granted_step = -1
        self.debtor: Account | None = None  # who pays for bringing it back: the tenant that pushed it out
        self.first_start_us: int | None = None
        self.first_token_us: int | None = None
        self.failures = 0
        self.num_preemptions = 0
        self.num_steps_without_token = 0
        self.num_holds = self.num_swaps = self.num_recomputes = 0
        self.recomputed_tokens = 0
        self.swapped_blocks = 0
        self.waits = WaitLog()

    @property
    def order_key(self) -> tuple[int, int, int, int]:
        """The one key for queueing and for victims; unique by its last part."""
        fresh = 1 + self.is_relegated if self.state is _WAITING else 0
        return (fresh, self.deadline_us, self.arrival_us, self.sequence_number)

    @property
    def total(self) -> int:
        """Tokens known; the last one is computed by the next step."""
        return self.prompt_len + len(self.output_ids)

    @property
    def computed(self) -> int:
        """Tokens whose keys and values exist. A decode is always one behind what is known: nothing has to be kept."""
        computed = self._computed
        return self.prompt_len + len(self.output_ids) - 1 if computed is None else computed

    @computed.setter
    def computed(self, computed: int) -> None:
        self._computed = computed

    def begin_decode(self) -> None:
        """From now on every step computes the last of the known tokens and gives one more."""
        self._computed = None
        self.sequence = DecodingSequence(
            self.request_id, self.request.prompt_token_ids, self.output_ids, self.block_table, self.sampling
        )

    def end_decode(self) -> None:
        self._computed = self.computed

    @property
    def rest(self) -> int:
        """Tokens known and not yet computed; 1 for a decode."""
        computed = self._computed
        return 1 if computed is None else self.prompt_len + len(self.output_ids) - computed

    @property
    def num_to_copy_in(self) -> int:
        """Blocks that a start has to bring back. On the device, what is on the host too is a copy."""
        return len(self.host_blocks) if self.state is State.ON_HOST else 0

    def tokens_between(self, start: int, end: int) -> Sequence[int]:
        """Token ids at positions ``[start, end)`` of prompt and output together."""
        if start >= self.prompt_len:
            return self.output_ids[start - self.prompt_len : end - self.prompt_len]
        if end <= self.prompt_len:
            return self.request.prompt_token_ids[start:end]
        return [*self.request.prompt_token_ids[start:], *self.output_ids[: end - self.prompt_len]]

    def finished(self, reason: FinishReason, now_us: int, gpu_us: int, detail: str = "") -> Finished:
        """The end of it as a value; prompt tokens are those computed at least once."""
        return Finished(
            request_id=self.request_id,
            reason=reason,
            prompt_tokens=min(max(self.computed, self.computed_high), self.prompt_len),
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.output_ids),
            counters=self.counters(now_us, gpu_us),
            detail=detail,
        )

    def counters(self, now_us: int, gpu_us: int) -> RequestCounters:
        """What it has cost until ``now_us``."""
        started_us = now_us if self.first_start_us is None else self.first_start_us
        return RequestCounters(
            queue_us=started_us - self.arrival_us,
            ttft_us=None if self.first_token_us is None else self.first_token_us - self.arrival_us,
            total_us=now_us - self.arrival_us,
            num_steps=self.num_steps_without_token + len(self.output_ids) - len(self.request.delivered_token_ids),
            num_holds=self.num_holds,
            num_swaps=self.num_swaps,
            num_recomputes=self.num_recomputes,
            recomputed_tokens=self.recomputed_tokens,
            swapped_blocks=self.swapped_blocks,
            gpu_us=gpu_us,
            waits=self.waits.told(),
        )
