"""A story beside its parts: ratios, targets, and what the last line says of them."""

from __future__ import annotations

import json

import pytest

from gpu_worker import simulate
from gpu_worker.simulated import DEVICES
from gpu_worker.simulation.compare import Comparison, Figure, only, spread_table
from gpu_worker.simulation.run import Simulation
from gpu_worker.simulation.stories import STORIES, Story, flood, overload, tenant_flood
from gpu_worker.simulation.traffic import SECOND_US, Arrival, Pace
from scheduler_engine.policy import PolicySnapshot, PriorityClass

H200 = DEVICES["h200-8b"]


def small_flood(seed: int, pace: Pace) -> list[Arrival]:
    """40 long prompts, and chats for 10 s."""
    arrivals = flood(seed, pace)
    bulk = [arrival for arrival in arrivals if arrival.submit.tenant_id == "bulk"][:40]
    return bulk + [arrival for arrival in arrivals if 0 < arrival.at_us < 10 * SECOND_US]


def small_overload(seed: int, pace: Pace) -> list[Arrival]:
    """Five seconds of calm and five of overload, with eight batch requests beside."""
    arrivals = overload(seed, pace)
    bulk = [arrival for arrival in arrivals if arrival.submit.tenant_id == "bulk"][:8]
    return bulk + [arrival for arrival in arrivals if 0 < arrival.at_us - 55 * SECOND_US < 10 * SECOND_US]


def small_tenant_flood(seed: int, pace: Pace) -> list[Arrival]:
    """The quiet tenant's first half minute and every twentieth request of the flood."""
    arrivals = [each for each in tenant_flood(seed, pace) if each.at_us < 30 * SECOND_US]
    return [each for i, each in enumerate(arrivals) if each.submit.tenant_id == "aurora" or i % 20 == 0]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORIES, "flood", Story(small_flood, (0, 10), has_targets=True))
    monkeypatch.setitem(STORIES, "overload", Story(small_overload, (60, 65), has_deadlines=True))
    monkeypatch.setitem(
        STORIES, "tenant_flood", Story(small_tenant_flood, (10, 30), has_targets=True, loud_tenant="nova")
    )


def values(story: str) -> dict[str, float | None]:
    return {
        figure.name: figure.value
        for figure in Comparison(
            story, STORIES[story], H200, PolicySnapshot(version=0, classes=H200.classes), 1, Simulation.run
        ).figures()
    }


def test_a_flood_is_compared_with_chats_alone_and_batch_alone() -> None:
    found = values("flood")
    ttft_ms, alone_ms = found["interactive TTFT p99, ms"], found["interactive TTFT p99 alone, ms"]
    assert ttft_ms is not None
    assert alone_ms is not None
    assert found["times alone"] == round(ttft_ms / alone_ms, 3)
    share = found["batch work, share of batch alone"]
    assert share is not None
    assert 0.5 < share < 1.0


def test_an_overload_is_compared_with_what_the_device_can_do() -> None:
    found = values("overload")
    capacity, on_time = found["capacity, chats a second"], found["on time in the overload, chats a second"]
    assert capacity is not None
    assert on_time is not None
    assert 15 < capacity < 30
    assert 0.9 * capacity < on_time < 1.1 * capacity  # five seconds are short: a queue may drain beyond them
    assert {"served of value 100, share", "served of value 10, share", "served of value 1, share"} <= set(found)


def test_a_flooding_tenant_is_compared_with_a_world_without_tenants() -> None:
    found = values("tenant_flood")
    ratio = found["nova ends, times without isolation"]
    assert ratio is not None
    assert 0.9 < ratio < 1.2
    assert found["the same without nova, ms"] is not None


@pytest.mark.parametrize(
    ("figure", "is_met", "target"),
    [
        (Figure("a", 2.0, at_most=2.5), True, "≤ 2.5"),
        (Figure("a", 2.6, at_most=2.5), False, "≤ 2.5"),
        (Figure("a", 0.9, at_least=0.9), True, "≥ 0.9"),
        (Figure("a", 0.899, at_least=0.9), False, "≥ 0.9"),
        (Figure("a", None, at_least=0.9), False, "≥ 0.9"),
        (Figure("a", 7.0), True, None),
    ],
)
def test_a_target_is_met_at_its_edge_and_never_by_a_figure_that_is_missing(
    figure: Figure, is_met: bool, target: str | None
) -> None:
    assert (figure.is_met, figure.target) == (is_met, target)


def test_the_table_says_missed_as_soon_as_one_seed_misses() -> None:
    good, bad = [Figure("tail", 1.0, at_most=2.0)], [Figure("tail", 3.0, at_most=2.0)]
    assert spread_table([good, good]).endswith("met")
    assert spread_table([good, bad]).endswith("MISSED")


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.00001234, "0.0000123"), (0.88, "0.88"), (12.345, "12.3"), (999.9, "1,000"), (12_345.6, "12,346"), (3.0, "3")],
)
def test_a_figure_is_written_out_and_never_as_a_power_of_ten(value: float, written: str) -> None:
    assert Figure("tail", value, at_most=value).target == f"≤ {written}"
    assert f" {written} " in spread_table([[Figure("tail", value, at_most=1e9)]])


def test_the_last_line_holds_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--story", "tenant_flood", "--compare", "--seeds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    ratio = found["comparison"]["nova ends, times without isolation"]
    assert len(ratio["values"]) == 2
    assert ratio["target"] == "≤ 1.03"
    assert found["classes"]["interactive"]["requests"] > 50


def test_only_picks_a_class_or_a_tenant() -> None:
    arrivals = small_flood(1, Pace(H200))
    assert {each.submit.priority_class for each in only(arrivals, "batch")} == {PriorityClass.BATCH}
    assert {each.submit.tenant_id for each in only(arrivals, "aurora")} == {"aurora"}
