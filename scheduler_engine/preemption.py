"""Whom to push out, and how: fewest and cheapest victims, all or nothing, each by its cheapest lever.

Knows victims and costs; refuses to push anybody out itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

from scheduler_engine.claims import beyond_floor
from scheduler_engine.cost import to_us
from scheduler_engine.events import Lever
from scheduler_engine.fairness import Account
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.prefix_cache import Giving
from scheduler_engine.state import EngineState

_NEARLY_DONE_TOKENS = 2


class Need(NamedTuple):
    """What is short: slots and device blocks, each 0 or more."""

    slots: int
    blocks: int


class Price(NamedTuple):
    """What it takes to make one request give way by its cheapest lever: device time there and back, host blocks."""

    lever: Lever
    cost_us: int
    host_blocks: int


class Victim(NamedTuple):
    """One way to make one request give way. ``cost_us``: device time it takes to push it out and to bring it back."""

    live: LiveRequest
    lever: Lever
    cost_us: int
    slots: int
    blocks: int
    host_blocks: int

    @property
    def given(self) -> list[int]:
        """Device blocks it gives, shared ones among them; ``blocks`` of them come free when it goes alone."""
        return [] if self.lever is Lever.HOLD else self.live.block_table


def choose_victims(
    state: EngineState, need: Need, candidates: Iterable[LiveRequest], *, reproducible_may_drop: bool = False
) -> list[Victim] | None:
    """The fewest and cheapest of ``candidates`` that together cover ``need``, or None when they cannot.

    One victim that covers all of it wins over several of the same class unless it costs more. O(candidates log
    candidates), asked only when a head is blocked.
    """
    market = _Market(state, need, reproducible_may_drop=reproducible_may_drop)
    offers = market.offers(candidates)
    several = _greedy(state, need, offers, market)
    if several is None or len(several) == 1:
        return several
    lowest_rank = min(victim.live.rank for victim in several)
    total_us = sum(victim.cost_us for victim in several)
    large = [(price.cost_us, key, live) for key, live, price in offers if len(live.block_table) >= need.blocks]
    for cost_us, _, live in sorted(large):
        if cost_us > total_us:
            break
        single = market.victim(live)
        if live.rank >= lowest_rank and single and single.slots >= need.slots and single.blocks >= need.blocks:
            return [single]
    return several


def _greedy(state: EngineState, need: Need, offers: list[_Offer], market: _Market) -> list[Victim] | None:
    slots, blocks = need
    host_free = state.host_room
    giving = Giving(state.device)
    chosen: list[Victim] = []
    for _, live, price in offers:
        if slots <= 0 and blocks <= 0:
            break
        is_host_full = price.host_blocks > host_free  # those before it have filled it
        victim = (market.with_host(host_free) if is_host_full else market).victim(live)
        if victim is None:
            continue
        gain = giving.gain(victim.given)
        if not ((slots > 0 and victim.slots) or (blocks > 0 and gain)):
            continue
        chosen.append(victim)
        giving.add(victim.given)
        host_free -= victim.host_blocks
        slots -= victim.slots
        blocks -= gain
    if slots > 0 or blocks > 0:
        return None
    return _pruned(chosen, giving, spare_slots=-slots, spare_blocks=-blocks)


def _pruned(chosen: list[Victim], giving: Giving, *, spare_slots: int, spare_blocks: int) -> list[Victim]:
    """Without those that turned out not to be needed, dearest first."""
    kept = list(chosen)
    for victim in sorted(chosen, key=lambda v: (v.live.rank, -v.cost_us)):
        loss = giving.loss(victim.given)
        if victim.slots <= spare_slots and loss <= spare_blocks and len(kept) > 1:
            kept.remove(victim)
            giving.remove(victim.given)
            spare_slots -= victim.slots
            spare_blocks -= loss
    return kept


_Offer = tuple[tuple[int, ...], LiveRequest, Price]  # the key orders the least wanted first and is unique
_key_of = itemgetter(0)


class _Market:
    """What it takes to make requests give way for a need. Lengths and tenants that many share are priced once."""

    def __init__(
        self, state: EngineState, need: Need, *, reproducible_may_drop: bool, host_free: int | None = None
    ) -> None:
        self._state = state
        self._need = need
        self._reproducible_may_drop = reproducible_may_drop
        self._host_free = state.host_room if host_free is None else host_free
        self._prices: dict[tuple[int, int, bool], Price | None] = {}
        self._services: dict[Account, int] = {}

    def with_host(self, host_free: int) -> _Market:
        """The same with less room on the host."""
        may_drop = self._reproducible_may_drop
        return _Market(self._state, self._need, reproducible_may_drop=may_drop, host_free=host_free)

    def offers(self, candidates: Iterable[LiveRequest]) -> list[_Offer]:
        """Those of them who can give way, least wanted first."""
        state, need_blocks = self._state, self._need.blocks
        device, classes, step = state.device, state.classes, state.step
        found: list[_Offer] = []
        for live in candidates:
            price = self._price(live)
            if price is None:
                continue
            policy = classes[live.rank]
            blocks = device.num_unique(live.block_table)
            if blocks > need_blocks:
                blocks = need_blocks
            key = (
                -live.rank,
                live.num_preemptions >= policy.max_preemptions,
                step - live.started_step < policy.quantum_steps,
                live.finish_total - live.total <= _NEARLY_DONE_TOKENS,
                price.cost_us // blocks if blocks else price.cost_us,
                -self._service(live.account),
                -live.deadline_us,
                -live.arrival_us,
                -live.sequence_number,
            )
            found.append((key, live, price))
        found.sort(key=_key_of)
        return found

    def victim(self, live: LiveRequest) -> Victim | None:
        """As it would give way; None where it cannot."""
        price = self._price(live)
        if price is None:
            return None
        blocks = 0 if price.lever is Lever.HOLD else self._state.device.num_unique(live.block_table)
        slots = 0 if live.state is State.HELD else 1
        return Victim(live, price.lever, price.cost_us, slots, blocks, price.host_blocks)

    def _price(self, live: LiveRequest) -> Price | None:
        kind = (live.computed, len(live.host_blocks), live.request.reproducible)
        if kind not in self._prices:
            self._prices[kind] = self._price_of_kind(live)
        return self._prices[kind]

    def _price_of_kind(self, live: LiveRequest) -> Price | None:
        lever = cheapest_lever(self._state, live, self._need, self._host_free, self._reproducible_may_drop)
        if lever is None:
            return None
        how, cost_us = lever
        return Price(how, cost_us, self._state.config.num_blocks_for(live.computed) if how is Lever.SWAP else 0)

    def _service(self, account: Account) -> int:
        service = self._services.get(account)
        if service is None:
            service = self._services[account] = account.service
        return service


def cheapest_lever(
    state: EngineState, live: LiveRequest, need: Need, host_free: int, reproducible_may_drop: bool
) -> tuple[Lever, int] | None:
    """The lever and its cost in device time, or None when none is open.

    hold: nothing is lost, but only the slot comes free. swap: out, less what is saved already, and in again at copy
    speed, if the host has room.
    recompute: the computed tokens once more; never for a request that must come out bit-equal. Ties go to the swap.
    """
    if not need.blocks:
        return Lever.HOLD, 0
    if live.computed == 0:
        return Lever.RECOMPUTE, 0
    cost = state.cost
    num_copied = state.config.num_blocks_for(live.computed)
    num_dirty = num_copied - len(live.host_blocks)
    swap_us = to_us(cost.copy_ns(num_dirty)) + to_us(cost.copy_ns(num_copied)) if num_copied <= host_free else None
    may_drop = reproducible_may_drop or not live.request.reproducible
    recompute_us = to_us(cost.prefill_ns(0, live.computed)) if may_drop else None
    if swap_us is None:
        return None if recompute_us is None else (Lever.RECOMPUTE, recompute_us)
    if recompute_us is None or swap_us <= recompute_us:
        return Lever.SWAP, swap_us
    return Lever.RECOMPUTE, recompute_us


def lower_classes(state: EngineState, rank: int) -> Iterator[LiveRequest]:
    """Candidates below ``rank``: on the device, not started in this step, and of a class that is owed its floor only
    those whom it can spare.
    """
    for lower in range(rank + 1, len(state.classes)):
        on_device = beyond_floor(state, lower) if state.floors.in_debt(lower) else state.running.on_device(lower)
        yield from (live for live in on_device if live.started_step != state.step)


def likely_victims(state: EngineState, rank: int, count: int) -> list[LiveRequest]:
    """The first ``count`` whom a head of class ``rank`` that is short of blocks would swap out. O(candidates)."""
    market = _Market(state, Need(0, state.config.block_size), reproducible_may_drop=False)
    swaps = [live for _, live, price in market.offers(lower_classes(state, rank)) if price.lever is Lever.SWAP]
    return swaps[:count]


def is_pinned(state: EngineState, live: LiveRequest) -> bool:
    """True for one that gave way as often as its class bears."""
    return live.num_preemptions >= state.classes[live.rank].max_preemptions


def may_preempt(state: EngineState, head: LiveRequest, live: LiveRequest) -> bool:
    """Strict class order, except that a tenant over its share of the whole device does not push out one under its own:
    nobody buys capacity by calling its work urgent.
    """
    accountant, now_us = state.accountant, state.now_us
    return accountant.is_over(live.account, now_us) or not accountant.is_over(head.account, now_us)


def overserved_tenants(state: EngineState, head: LiveRequest) -> list[LiveRequest]:
    """Candidates of the head's own class: tenants that had more than the fairness gap B beyond the head's, past their
    quantum and further than they were before: each turn is progress, however small the gap. Not those who were given
    a block or a part of this step already. O(1) while nobody can have had so much.
    """
    rank = head.rank
    limit = head.account.service + state.service_gap(rank)
    if state.accountant.ceilings[rank] <= limit:
        return []
    services: dict[Account, int] = {}
    found = []
    quantum = max(1, state.classes[rank].quantum_steps)
    for live in state.running.on_device(rank):
        account = live.account
        service = services.get(account)
        if service is None:
            service = services[account] = account.service
        if service <= limit or live.granted_step == state.step:
            continue
        if live.computed > live.computed_at_start and state.step - live.started_step >= quantum:
            found.append(live)
    state.accountant.ceilings[rank] = max(services.values(), default=0)
    return found


def steps_until_free(state: EngineState, need: Need, max_steps: int) -> int | None:
    """In how many steps natural ends free what is short, or None when it takes more than ``max_steps``.

    Counts only ends that are certain: requests at their token limit.
    """
    ends: dict[int, tuple[int, int]] = {}
    for live, left in state.running.ending_within(max_steps):
        slots, blocks = ends.get(left, (0, 0))
        ends[left] = (slots + 1, blocks + state.device.num_unique(live.block_table))
    slots, blocks = need
    for left in sorted(ends):
        slots -= ends[left][0]
        blocks -= ends[left][1]
        if slots <= 0 and blocks <= 0:
            return max(1, left)
    return None
