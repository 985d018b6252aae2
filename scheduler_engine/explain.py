"""Why a request waited: its time split by cause, and what was decided about it, in words and amounts.

Knows the journal; decides nothing. No other tenant is ever named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_engine.journal import Ended
from scheduler_engine.live import LiveRequest
from scheduler_engine.policy import PriorityClass
from scheduler_engine.record import NOT_OPEN, Action, Cause, DecisionRecord
from scheduler_engine.request import RequestId
from scheduler_engine.state import EngineState
from scheduler_engine.waits import WaitShare, shares_of

_CAUSES = {
    Cause.STEP_UNDER_WAY: "for the end of the step that was under way",
    Cause.SLOTS: "for a slot held by {holder}",
    Cause.MEMORY: "for KV memory held by {holder}",
    Cause.HEADROOM: "for KV memory that those who run ({holder}) will need",
    Cause.STEP_BUDGET: "for room in the step, taken by {holder}",
    Cause.STEP_TIME: "while step time was left to {holder}",
    Cause.EARMARK: "for room that was set apart for another request",
    Cause.COPY_FENCE: "for the copy of what had been pushed out for it",
    Cause.COPY_TURN: "for copies to the host to end before its own copy back",
    Cause.SAVING: "for its own copy to the host",
    Cause.OWN_TENANT: "behind other requests of its own tenant",
    Cause.OTHER_TENANT: "behind another tenant with less service",
    Cause.CONCURRENCY: "for its tenant's limit of running requests (none while its class is paused)",
    Cause.PATIENCE: "for running requests ({holder}) that were about to end",
    Cause.POLICY_PAUSE: "while its class was paused by an overload of a class above",
    Cause.PREFIX: "for a prefix that another request was computing",
    Cause.SHARE: "for tenants with a smaller share of its class, to whom the last of it belongs",
    Cause.RESTING: "because memory had just been taken from its class",
    Cause.GOVERNOR: "because its class ran fewer at once while switching cost too much",
}
_LEVERS = {
    "hold": "kept its KV memory and gave up its slot",
    "swap": "was copied to host memory",
    "recompute": "gave up its KV memory, to be computed again",
}

_PLAIN = {
    Action.QUEUED: "let in",
    Action.REFUSED: "refused: {outcome}",
    Action.ADMITTED: "started",
    Action.RESUMED: "started again",
    Action.HELD: "{count} decodes of the class begin to sit steps out",
    Action.BYPASSED: "passed by a smaller request behind it",
    Action.SHED: "shed: {outcome}",
    Action.FINISHED: "ended: {outcome}",
    Action.SAVED: "its copy to the host was complete",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision about the request. ``at_us`` counts from its arrival."""

    at_us: int
    action: Action
    text: str
    record: DecisionRecord


@dataclass(frozen=True, slots=True)
class Explanation:
    """Always: ``queued`` sums to ``queue_us`` and ``paused`` to ``paused_us``, exactly; queued, paused and running time
    sum to ``total_us``.

    ``outcome`` is how it ended, None while it lives. ``is_whole``: no record of it has been overwritten yet.
    """

    request_id: RequestId
    tenant_id: str
    priority_class: PriorityClass
    outcome: str | None
    total_us: int
    queue_us: int
    paused_us: int
    ttft_us: int | None
    queued: tuple[WaitShare, ...]
    paused: tuple[WaitShare, ...]
    timeline: tuple[Entry, ...]
    is_whole: bool

    @property
    def running_us(self) -> int:
        return self.total_us - self.queue_us - self.paused_us

    @property
    def text(self) -> str:
        """One line: "waited 412 ms: 380 ms for KV memory held by the batch class, 32 ms behind another tenant …"."""
        sentences = [_sentence("waited", self.queued)]
        if self.paused:
            sentences.append(_sentence("paused for", self.paused))
        return "; ".join(sentences)


def explain(state: EngineState, request_id: RequestId) -> Explanation | None:
    """For a request that lives, or was among the last 4,096 to end; None for any other. O(its records)."""
    live = state.lives.get(request_id)
    if live is not None:
        return _of_live(state, live)
    ended = state.journal.ended.get(request_id)
    return None if ended is None else _of_ended(state, ended)


def _of_live(state: EngineState, live: LiveRequest) -> Explanation:
    now_us = state.journal.now_us
    log = state.journal.waits.until(live.account, live.waits, now_us)
    firsts = (live.first_start_us, live.first_token_us)
    key = (live.request_id, live.account.tenant_id, live.request.priority_class)
    return _of_ended(state, Ended(*key, "", live.arrival_us, *firsts, now_us, log))


def _of_ended(state: EngineState, ended: Ended) -> Explanation:
    log = ended.log
    records, is_whole = _records(state, log.last_record)
    queued, paused = shares_of(log.queued), shares_of(log.paused)
    return Explanation(
        request_id=ended.request_id,
        tenant_id=ended.tenant_id,
        priority_class=ended.priority_class,
        outcome=ended.outcome or None,
        total_us=ended.ended_us - ended.arrival_us,
        queue_us=sum(share.duration_us for share in queued),
        paused_us=sum(share.duration_us for share in paused),
        ttft_us=None if ended.first_token_us is None else ended.first_token_us - ended.arrival_us,
        queued=queued,
        paused=paused,
        timeline=tuple(
            Entry(record.now_us - ended.arrival_us, Action(record.action), describe(record), record)
            for record in records
        ),
        is_whole=is_whole,
    )


def _records(state: EngineState, number: int) -> tuple[list[DecisionRecord], bool]:
    """Oldest first, from the newest back as far as the ring goes."""
    ring = state.journal.ring
    found: list[DecisionRecord] = []
    while (record := ring.get(number)) is not None:
        found.append(record)
        number = record.previous
    found.reverse()
    return found, number == 0


def words(share: WaitShare) -> str:
    """What the time was lost to, for a person."""
    holder = "others" if share.holder is None else f"the {share.holder.label} class"
    return _CAUSES[share.cause].format(holder=holder)


def _sentence(verb: str, shares: Sequence[WaitShare]) -> str:
    """Milliseconds are rounded so that the parts sum to the whole."""
    total_us = sum(share.duration_us for share in shares)
    parts = ", ".join(f"{ms} ms {words(share)}" for share, ms in zip(shares, milliseconds(shares), strict=True) if ms)
    whole = f"{verb} {(total_us + 500) // 1_000} ms"
    return f"{whole}: {parts}" if parts else whole


def milliseconds(shares: Iterable[WaitShare]) -> list[int]:
    """Each share in whole milliseconds: differences of the rounded running sum, so nothing is lost or made up."""
    found: list[int] = []
    sum_us = told = 0
    for share in shares:
        sum_us += share.duration_us
        found.append((sum_us + 500) // 1_000 - told)
        told += found[-1]
    return found


def describe(record: DecisionRecord) -> str:
    """One decision, for a person."""
    action = Action(record.action)
    holder = f"the {PriorityClass(record.holder - 1).label} class" if record.holder else "others"
    match action:
        case Action.PREEMPTED:
            by = f"for a request of {holder}" if record.other else "for others"
            return f"{_LEVERS[record.lever_label]} {by} ({record.resource_label}; {_costs(record)})"
        case Action.BLOCKED:
            return f"waits {_CAUSES[Cause(record.cause)].format(holder=holder)}"
        case _:
            return _PLAIN[action].format(outcome=record.outcome_label, count=record.need_slots)


def _costs(record: DecisionRecord) -> str:
    names = ("hold", "swap", "recompute", "wait")
    costs = (record.hold_us, record.swap_us, record.recompute_us, record.wait_us)
    return ", ".join(
        f"{name} {'not open' if us == NOT_OPEN else f'{us} us'}" for name, us in zip(names, costs, strict=True)
    )
