"""Who pays for a step: what it lasted is split among its rows and copies by what each was predicted to cost.

Knows one step and its length; refuses to know tokens.
"""

from __future__ import annotations

from scheduler_engine.draft import Draft
from scheduler_engine.fairness import Account
from scheduler_engine.governor import lost_ns
from scheduler_engine.metering import UNIT_BITS
from scheduler_engine.policy import RANKS
from scheduler_engine.state import EngineState

_FINE = 1_024  # costs of a step are split in parts of a nanosecond, so that prices are rounded once


def charge_step(state: EngineState, draft: Draft, duration_us: int, now_us: int) -> None:
    """Decodes pay through the meter, the rest one by one, and the first row what the division leaves: what the step
    lasted is charged once, to the last fraction. Rows pay for themselves, except what they compute again because a
    higher class pushed them out: its tenant pays.
    """
    cost = state.cost
    row_cost = cost.decode_ns(_FINE, 0) + _FINE  # a nanosecond more per row, so that none is free
    token_cost = cost.decode_ns(0, _FINE)
    taking_part = state.running.taking_part()
    decode_costs = [len(seats.members) * row_cost + seats.num_tokens * token_cost for seats in taking_part]
    total = decodes_cost = sum(decode_costs)
    chunk_ns: list[int] = []
    prefill_ns = copies_ns = 0
    is_quiet = not (draft.chunks or draft.copy_charges)
    if not is_quiet:
        chunk_ns = [cost.prefill_ns(live.computed, count) for live, count in draft.chunks]
        prefill_ns, copies_ns = sum(chunk_ns), sum([copy.cost_ns for copy in draft.copy_charges])
        total += (prefill_ns + len(chunk_ns) + copies_ns) * _FINE
    if not total:
        return
    rate, rest = divmod(duration_us << UNIT_BITS, total)
    row_price, token_price, served = rate * row_cost, rate * token_cost, [0] * len(RANKS)
    for seats, decode_cost in zip(taking_part, decode_costs, strict=True):
        seats.meter.price(row_price, token_price)
        served[seats.rank] = rate * decode_cost
    for (live, _), row_ns in zip(draft.chunks, chunk_ns, strict=True):
        units = rate * (row_ns + 1) * _FINE
        live.tab.charge(units)
        _bill(live.account if live.debtor is None else live.debtor, units, served)
    for account, cost_ns in draft.copy_charges:
        _bill(account, rate * cost_ns * _FINE, served)
    _bill_rest(state, draft, rest, served)
    state.accountant.busy_us += duration_us
    cost.observe(
        decode_ns=cost.base_ns + decodes_cost // _FINE,
        prefill_ns=prefill_ns,
        copy_ns=copies_ns,
        duration_us=duration_us,
    )
    served_us = [state.accountant.serve(rank, units) if units else 0 for rank, units in enumerate(served)]
    state.floors.settle(state.classes, served_us=served_us, has_work=state.num_lives)
    lost_us = 0 if is_quiet else duration_us * lost_ns(cost, draft) * _FINE // total
    state.governor.settle(
        state.classes, state.running.num_in_slots, busy_us=duration_us, lost_us=lost_us, now_us=now_us
    )


def _bill(account: Account, units: int, served: list[int]) -> None:
    account.charge(units)
    served[account.priority_class] += units


def _bill_rest(state: EngineState, draft: Draft, units: int, served: list[int]) -> None:
    owners = state.running.batch().owners
    if owners:
        live = owners[0]
    elif draft.chunks:
        live = draft.chunks[0].live
    else:
        _bill(draft.copy_charges[0].account, units, served)
        return
    live.tab.charge(units)
    _bill(live.account if live.debtor is None else live.debtor, units, served)
