"""The four counts side by side: what engines counted, what the gate holds, what the ledger and its roll-ups say.

Reads only. After a drain every difference is 0; anything else is a broken book and is shown, never smoothed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from django.utils import timezone

from billing import engine_counts, rollups, selectors
from billing.selectors import TokenSums
from gateway.gate import Gate, Window

WINDOWS_LIVE = timedelta(days=35)  # Redis keeps a money window for 40 days


@dataclass(frozen=True, slots=True)
class EngineSums:
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class MoneySums:
    """Over all money windows that Redis still keeps."""

    open_micros: int
    settled_micros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """One look at all four. Always: every figure was read, none was derived from another side."""

    engine: EngineSums
    rework: EngineSums
    gate: MoneySums
    ledger: TokenSums
    ledger_money: MoneySums
    rollup: TokenSums
    num_waiting_usages: int
    num_wrong_rollups: int
    num_wrong_windows: int
    num_open_alerts: int

    def differences(self) -> dict[str, int]:
        """Left minus right; all 0 when the books are right."""
        return {
            "engine-ledger prompt_tokens": self.engine.prompt_tokens - self.ledger.prompt_tokens,
            "engine-ledger output_tokens": self.engine.output_tokens - self.ledger.output_tokens,
            "ledger-rollup prompt_tokens": self.ledger.prompt_tokens - self.rollup.prompt_tokens,
            "ledger-rollup output_tokens": self.ledger.output_tokens - self.rollup.output_tokens,
            "ledger-rollup cost_micros": self.ledger.cost_micros - self.rollup.cost_micros,
            "gate-ledger open_micros": self.gate.open_micros - self.ledger_money.open_micros,
            "gate-ledger settled_micros": self.gate.settled_micros - self.ledger_money.settled_micros,
            "wrong roll-up rows": self.num_wrong_rollups,
            "wrong money windows": self.num_wrong_windows,
        }

    @property
    def is_drained(self) -> bool:
        return self.num_waiting_usages == 0

    @property
    def is_right(self) -> bool:
        return self.is_drained and not any(self.differences().values())

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "differences": self.differences(),
            "is_drained": self.is_drained,
            "is_right": self.is_right,
        }


def look(gate: Gate) -> Reconciliation:
    """Raises BusError. Figures of a system at work may differ by what is under way: drain first."""
    engine_counts.keep(gate.counted())
    windows = gate.windows()
    booked = {
        (str(sums.tenant_id), sums.priority_class, sums.window_id): Window(sums.open_micros, sums.settled_micros)
        for sums in selectors.window_sums(since=timezone.now() - WINDOWS_LIVE)
    }
    return Reconciliation(
        engine=EngineSums(*selectors.engine_sums()),
        rework=EngineSums(*selectors.rework_sums()),
        gate=_money(windows),
        ledger=selectors.ledger_sums(),
        ledger_money=_money(booked),
        rollup=selectors.rollup_sums(),
        num_waiting_usages=gate.num_waiting_usages(),
        num_wrong_rollups=rollups.num_wrong_rows(),
        num_wrong_windows=_num_wrong(windows, booked),
        num_open_alerts=selectors.num_open_alerts(),
    )


def _money(windows: Mapping[tuple[str, str, str], Window]) -> MoneySums:
    return MoneySums(
        sum(window.open_micros for window in windows.values()),
        sum(window.settled_micros for window in windows.values()),
    )


def _num_wrong(gate: Mapping[tuple[str, str, str], Window], booked: Mapping[tuple[str, str, str], Window]) -> int:
    nothing = Window(0, 0)
    return sum(gate.get(key, nothing) != booked.get(key, nothing) for key in gate.keys() | booked.keys())
