"""The engine's account of one request as a message. Knows words and amounts; decides nothing."""

from __future__ import annotations

from scheduler_engine.explain import words
from scheduler_engine.request import RequestId
from scheduler_engine.scheduler import Scheduler
from wire.messages import MOST_EXPLAINED, Explain, Explained


def explained(scheduler: Scheduler, question: Explain) -> Explained:
    """Bounded: the newest MOST_EXPLAINED decisions."""
    key = (question.response_id, question.choice)
    found = scheduler.explain(RequestId(f"{question.response_id}/{question.choice}"))
    if found is None:
        return Explained(response_id=key[0], choice=key[1], is_known=False)
    phases = (("queued", found.queued), ("paused", found.paused))
    timeline = found.timeline[-MOST_EXPLAINED:]
    return Explained(
        response_id=key[0],
        choice=key[1],
        is_known=True,
        sentence=found.text,
        outcome=found.outcome or "",
        total_us=found.total_us,
        queue_us=found.queue_us,
        paused_us=found.paused_us,
        ttft_us=found.ttft_us,
        waits=tuple((phase, words(share), share.duration_us) for phase, shares in phases for share in shares),
        timeline=tuple((entry.at_us, entry.text) for entry in timeline),
        is_whole=found.is_whole and len(timeline) == len(found.timeline),
    )
