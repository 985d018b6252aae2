"""A tenant that comes, or wants more, stands level with those who wait: wanting little earns no credit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy

SECOND_US = 1_000_000


class Loads:
    """Tenants that each keep a number of requests of a shape under way."""

    def __init__(
        self, priority_class: PriorityClass, *, policy: PolicySnapshot | None = None, blocks: int = 256, slots: int = 8
    ) -> None:
        self.world = World(blocks, slots, None, policy=policy, check=False, max_model_len=8_192)
        self._priority_class = priority_class
        self._alive: dict[str, list[str]] = {}

    def keep(self, until_us: int, **loads: tuple[int, int, int]) -> None:
        """(how many, prompt, output) by tenant."""
        while self.world.now_us < until_us:
            for tenant, (count, prompt, output) in loads.items():
                alive = [i for i in self._alive.get(tenant, ()) if not self.world.story(i).has_ended]
                more = self.world.many(count - len(alive), self._priority_class, prompt, output, tenant=tenant)
                self._alive[tenant] = alive + more
            self.world.run_step()

    def had(self, until_us: int, **loads: tuple[int, int, int]) -> Counter[str]:
        """Device time of each tenant while these are kept."""
        before = self.charges()
        self.keep(until_us, **loads)
        return self.charges() - before

    def charges(self) -> Counter[str]:
        return Counter({tenant: us for (_, tenant), us in self.world.engine.charges_us().items()})


HEAVY = FLOOD = (30, 200, 60)


@pytest.mark.parametrize(
    ("priority_class", "light", "cell"),
    [
        (BATCH, (1, 16, 2_000), {}),  # one long answer at a time
        (DEFAULT, (3, 50, 60), {"concurrency": 1}),  # held back by its own cap
        (INTERACTIVE, (1, 16, 2_000), {}),
    ],
    ids=["streams one answer", "is capped", "streams one chat"],
)
def test_a_newcomer_shares_with_a_heavy_tenant_though_a_third_that_wants_little_has_had_little(
    priority_class: PriorityClass, light: tuple[int, int, int], cell: dict[str, Any]
) -> None:
    row = TenantClassPolicy(tenant_id="light", priority_class=priority_class, **cell)
    loads = Loads(priority_class, policy=policy(row, max_queue_wait_ms=None))
    loads.keep(30 * SECOND_US, heavy=HEAVY, light=light)
    had = loads.had(45 * SECOND_US, heavy=HEAVY, light=light, new=FLOOD)
    assert had["new"] > 4 * SECOND_US
    assert abs(had["heavy"] - had["new"]) <= 0.1 * had["new"]


def test_a_tenant_that_trickles_banks_no_credit_for_the_flood_that_follows() -> None:
    loads = Loads(BATCH)
    loads.keep(60 * SECOND_US, heavy=HEAVY, trickle=(1, 16, 100))
    had = loads.had(70 * SECOND_US, heavy=HEAVY, trickle=FLOOD)
    assert abs(had["heavy"] - had["trickle"]) <= 0.1 * had["heavy"]


def test_what_a_tenant_had_while_nobody_waited_is_not_held_against_it_when_another_comes_and_goes() -> None:
    loads = Loads(BATCH)
    loads.keep(30 * SECOND_US, heavy=(8, 200, 60), light=(0, 0, 0))  # as many as there are slots: nobody waits
    loads.keep(31 * SECOND_US, light=(1, 16, 2_000))  # heavy ends, light stays
    had = loads.had(41 * SECOND_US, heavy=HEAVY, light=(1, 16, 2_000), new=FLOOD)
    assert abs(had["heavy"] - had["new"]) <= 0.15 * had["new"]


def test_a_head_that_is_kept_out_of_the_last_slots_holds_up_nobody_they_are_kept_for() -> None:
    loud = TenantClassPolicy(tenant_id="loud", priority_class=INTERACTIVE, weight=50)
    loads = Loads(INTERACTIVE, policy=policy(loud), blocks=8_000, slots=64)
    world = loads.world
    world.submit(INTERACTIVE, 32, 5, tenant="quiet")
    loads.keep(3 * SECOND_US, loud=(90, 64, 1_500))
    chats = []
    for number in range(1, 61):
        chats.append(world.submit(INTERACTIVE, 32, 10, tenant="quiet"))
        loads.keep((3 * SECOND_US) + number * 100_000, loud=(90, 64, 1_500))
    world.run(20)
    assert max(world.story(chat).ttft_us for chat in chats) <= 100_000


@pytest.mark.parametrize("bar", [{"allowed": False}, {"concurrency": 0}, {"concurrency": 1}])
def test_a_tenant_that_an_edit_lets_in_again_banked_no_credit_while_it_was_held_back(bar: dict[str, Any]) -> None:
    loads = Loads(BATCH)
    loads.keep(2 * SECOND_US, heavy=HEAVY, held=FLOOD)
    row = TenantClassPolicy(tenant_id="held", priority_class=BATCH, **bar)
    loads.world.engine.set_policy(policy(row, version=2))
    loads.keep(40 * SECOND_US, heavy=HEAVY)
    loads.world.engine.set_policy(policy(version=3))
    had = loads.had(50 * SECOND_US, heavy=HEAVY, held=FLOOD)
    assert abs(had["heavy"] - had["held"]) <= 0.15 * had["heavy"]


def test_what_a_barred_tenant_had_before_is_not_held_against_it_by_one_that_came_meanwhile() -> None:
    loads = Loads(BATCH)
    loads.keep(30 * SECOND_US, first=FLOOD)
    bar = TenantClassPolicy(tenant_id="first", priority_class=BATCH, allowed=False)
    loads.world.engine.set_policy(policy(bar, version=2))
    loads.keep(36 * SECOND_US, first=(0, 0, 0))  # those who run come to their end
    loads.keep(40 * SECOND_US, new=FLOOD)
    loads.world.engine.set_policy(policy(version=3))
    had = loads.had(50 * SECOND_US, first=FLOOD, new=FLOOD)
    assert abs(had["first"] - had["new"]) <= 0.15 * had["new"]
