"""What a tenant has under way just now: on the devices, and waiting behind this gateway; each can be cancelled.

Knows load snapshots and this process's streams; refuses to know what is asked and answered.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asgiref.sync import async_to_sync
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from gateway import runtime
from gateway.console.pages.membership import Member, page
from gateway.loads import loads
from gateway.response_stream import ResponseStream
from scheduler_engine.policy import PriorityClass
from tenants.roles import Capability
from wire.bus import BusError
from wire.messages import Cancel, LoadSnapshot

SHOWN = 200
_STATES = {
    "waiting": "waiting",
    "prefill": "reading the prompt",
    "decode": "answering",
    "held": "paused, kept on the device",
    "on_host": "paused, copied to the host",
    "dropped": "paused, to be computed again",
}


@dataclass(frozen=True, slots=True)
class UnderWay:
    """One request. ``age_s`` is read off its id; a line of a batch has none, and ends with its batch."""

    response_id: uuid.UUID
    priority_class: PriorityClass
    state: str
    num_tokens: int
    age_s: int | None

    @property
    def label(self) -> str:
        return self.priority_class.label

    @property
    def words(self) -> str:
        return _STATES.get(self.state, self.state)

    @property
    def is_of_a_batch(self) -> bool:
        return self.response_id.version == 5


@require_safe
@page(Capability.SEE_USAGE)
def live(request: HttpRequest, me: Member) -> HttpResponse:
    """With HX-Request the table alone, which the page asks for again and again."""
    try:
        found = under_way(str(me.tenant.id), async_to_sync(loads)(), _streams(), time.time())
    except BusError:
        found = None
    context = {"me": me, "rows": (found or [])[:SHOWN], "num_all": len(found or []), "is_deaf": found is None}
    name = "live_list" if request.headers.get("HX-Request") else "live"
    return render(request, f"console/{name}.html", context)


@require_POST
@page(Capability.SEE_USAGE, to_change=Capability.USE_PLAYGROUND)
def cancel(request: HttpRequest, me: Member, response_id: uuid.UUID) -> HttpResponse:
    """The same words for one that has ended, one of another tenant and one that never was."""
    if _cancel(str(me.tenant.id), response_id):
        messages.success(request, "It is told to stop: what was made up to now is charged.")
    else:
        messages.error(request, "Nothing of this id is under way here; it may just have ended.")
    return redirect("console-live", slug=me.tenant.slug)


def under_way(
    tenant_id: str, snapshots: Iterable[LoadSnapshot], streams: Iterable[ResponseStream], now_s: float
) -> list[UnderWay]:
    """Those of one tenant, by class, oldest first. What waits is seen by the gateway that let it in."""
    found: dict[str, UnderWay] = {}
    for load in snapshots:
        for row in load.board:
            if row.tenant_id == tenant_id:
                known = found.get(row.response_id)  # choices of one response are rows of their own
                tokens = row.num_output_tokens + (known.num_tokens if known else 0)
                found[row.response_id] = _row(row.response_id, row.priority_class, row.state, tokens, now_s)
    for stream in streams:
        if stream.grant.tenant_id == tenant_id and stream.end is None and stream.response_id not in found:
            tokens = sum(len(choice.token_ids) for choice in stream.choices)
            state = "decode" if tokens else "waiting"
            submit = stream.submit
            found[stream.response_id] = _row(stream.response_id, submit.priority_class, state, tokens, now_s)
    return sorted(found.values(), key=lambda row: (row.priority_class, row.response_id))


async def stop(current: runtime.Runtime, response_id: str) -> bool:
    """Cancels one whichever gateway reads it. False where it has ended. Raises BusError."""
    stream = current.streams.get(response_id)
    if stream is not None:
        current.door.cancel(stream)
        return stream.end is None
    owner = await current.ownership.owner(response_id)
    if owner is None or not owner.is_open:
        return False
    message = Cancel(response_id=response_id, attempt=owner.attempt, reason="client")
    await current.bus.send(owner.worker_id, message)
    return True


def _row(name: str, priority_class: PriorityClass, state: str, num_tokens: int, now_s: float) -> UnderWay:
    response_id = uuid.UUID(name)
    made_at_s = (response_id.int >> 80) / 1_000  # UUIDv7 begins with milliseconds
    age_s = max(0, int(now_s - made_at_s)) if response_id.version == 7 else None
    return UnderWay(response_id, priority_class, state, num_tokens, age_s)


def _cancel(tenant_id: str, response_id: uuid.UUID) -> bool:
    current = runtime.current()
    if current is None:
        return False
    try:
        found = under_way(tenant_id, async_to_sync(loads)(), _streams(), time.time())
        if not any(row.response_id == response_id and not row.is_of_a_batch for row in found):
            return False
        return async_to_sync(stop)(current, str(response_id))
    except BusError:
        return False


def _streams() -> Sequence[ResponseStream]:
    current = runtime.current()
    return tuple(current.streams) if current is not None else ()
