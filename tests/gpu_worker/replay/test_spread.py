"""Several runs that might have been, as one report."""

from __future__ import annotations

from typing import Any

from gpu_worker.replay.spread import middle


def report(p99: float | None, gap_ms: float, refused: dict[str, int]) -> dict[str, Any]:
    row = {"tokens_per_s": 10.0, "refused": refused, "ttft_ms": {"p50": 1.0, "p99": p99}}
    return {"steps": 5, "classes": {"batch": row}, "tenants": {}, "fairness_gap_ms": {"batch": gap_ms}}


def test_each_figure_is_the_median_beside_its_least_and_its_most() -> None:
    found = middle([report(30.0, 3.0, {"late": 4}), report(10.0, 9.0, {"late": 2}), report(20.0, 6.0, {"late": 3})])
    batch = found["classes"]["batch"]
    assert (batch["ttft_ms"], batch["refused"]) == ({"p50": 1.0, "p99": 20.0}, {"late": 3})
    assert batch["spread"] == {"ttft_p50": [1.0, 1.0], "ttft_p99": [10.0, 30.0], "tokens_per_s": [10.0, 10.0]}
    assert (found["fairness_gap_ms"], found["fairness_gap_spread_ms"]) == ({"batch": 6.0}, {"batch": [3.0, 9.0]})


def test_what_never_happened_in_a_draw_was_counted_0_times_and_what_it_cannot_say_is_left_out() -> None:
    found = middle([report(None, 0.0, {}), report(10.0, 0.0, {"late": 7}), report(None, 0.0, {})])
    batch = found["classes"]["batch"]
    assert batch["refused"] == {"late": 0}
    assert batch["spread"]["ttft_p99"] == [10.0, 10.0]
    assert middle([report(None, 0.0, {})])["classes"]["batch"]["spread"]["ttft_p99"] is None


def test_a_tenant_whom_only_some_draws_met_is_told_from_those() -> None:
    met, missed = report(10.0, 0.0, {}), report(10.0, 0.0, {})
    met["tenants"] = {"nova": met["classes"]["batch"]}
    assert middle([missed, met])["tenants"]["nova"]["ttft_ms"]["p99"] == 10.0
