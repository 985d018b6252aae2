"""What a tenant's classes may use, and how much of their budgets is used: for all pages that show limits.

Amounts are read for those alone who may see money; others learn that there is a budget, and until when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS
from django.utils import timezone

from gateway.budgets import Window, spent_in, window_of
from gateway.console.pages.membership import Member
from gateway.gate import Gate, Spent
from tenants.models import PriorityClass, QuotaPolicy
from tenants.roles import Capability
from wire.bus import BusError
from wire.redis_keys import Keys


@dataclass(frozen=True, slots=True)
class Budget:
    """Of one class, in its window of now. ``spent`` None: its reader sees no money, or the gate does not answer.
    ``begins_anew``: the moment at which the next window does, on the tenant's clock.
    """

    window: Window
    kind: str
    cap_micros: int
    begins_anew: str
    spent: Spent | None

    @property
    def left_micros(self) -> int:
        """What the next call may cost at worst; nothing, where more is used than there is since an edit."""
        used = 0 if self.spent is None else self.spent.settled_micros + self.spent.open_micros
        return max(0, self.cap_micros - used)


def limits_of(me: Member) -> dict[str, Any]:
    """What ``console/quotas.html`` shows."""
    quotas = list(QuotaPolicy.objects.order_by("priority_class"))
    classes = PriorityClass.objects.using(DEFAULT_DB_ALIAS)  # the platform's, the same for everybody
    of_class = dict(classes.values_list("label", "hard_deadline_ms"))
    deadlines = ((quota.hard_deadline_ms, of_class.get(quota.priority_class)) for quota in quotas)
    shortest = [min((one for one in both if one is not None), default=None) for both in deadlines]
    return {"quotas": list(zip(quotas, shortest, strict=True)), "budgets": budgets_of(me, quotas)}


def budgets_of(me: Member, quotas: Iterable[QuotaPolicy]) -> list[Budget]:
    """Of those classes that are granted and have one."""
    now, zone = timezone.now(), ZoneInfo(me.tenant.timezone)
    capped = [(one, one.money_micros) for one in quotas if one.allowed and one.money_micros is not None]
    windows = [
        window_of(now, me.tenant.id, one.priority_class, one.money_window, cap, me.tenant.timezone)
        for one, cap in capped
    ]
    spent = _spent(windows) if windows and me.may(Capability.SEE_MONEY) else {}
    return [
        Budget(window, one.money_window, cap, _on_the_clock(window.ends_at, zone), spent.get(window))
        for (one, cap), window in zip(capped, windows, strict=True)
    ]


def _on_the_clock(moment: datetime, zone: ZoneInfo) -> str:
    return f"{moment.astimezone(zone):%Y-%m-%d %H:%M} ({zone.key})"


def _spent(windows: Sequence[Window]) -> dict[Window, Spent]:
    """None of them while the gate does not answer."""
    try:
        with Gate(settings.REDIS_URL, Keys(settings.RUBATO_REDIS_PREFIX)) as gate:
            return {window: spent for window, _, spent in spent_in(windows, gate)}
    except BusError:
        return {}
