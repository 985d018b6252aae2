"""The simulator as a program: small stories, what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from gpu_worker import simulate
from gpu_worker.simulated import DEVICES
from gpu_worker.simulation.report import report
from gpu_worker.simulation.run import Simulation
from gpu_worker.simulation.stories import STORIES, Story, flood, overload, tenant_flood
from gpu_worker.simulation.traffic import Arrival, Pace, submit_of
from scheduler_engine.policy import PriorityClass

H200, TOY = DEVICES["h200-8b"], DEVICES["toy"]


def small_flood(seed: int, pace: Pace) -> list[Arrival]:
    """The first 50 long prompts and 20 s of chats."""
    arrivals = flood(seed, pace)
    bulk = [arrival for arrival in arrivals if arrival.submit.tenant_id == "bulk"][:50]
    chats = [arrival for arrival in arrivals if 0 < arrival.at_us < pace.us(20_000_000)]
    return sorted(bulk + chats, key=lambda arrival: arrival.at_us)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORIES, "flood", Story(small_flood, (0, 20)))


def test_chats_are_answered_at_once_in_a_flood_and_nothing_is_computed_twice() -> None:
    arrivals = small_flood(1, Pace(H200))
    outcome = Simulation(H200, arrivals).run()
    result = report(outcome, story="flood", seed=1)
    assert result["classes"]["interactive"]["ttft_ms"]["p99"] < 500
    assert result["recomputed_tokens"] == 0
    ended = sum(row["completed"] + row["shed"] for row in result["classes"].values())
    assert ended == len(arrivals) == len(outcome.usages)
    assert result["classes"]["batch"]["completed"] == 50


def test_a_simulation_repeats_to_the_plan_for_the_same_seed() -> None:
    first, second, other = (Simulation(H200, small_flood(seed, Pace(H200))).run() for seed in (3, 3, 4))
    assert (first.digest, first.virtual_us) == (second.digest, second.virtual_us)
    assert first.clients.views == second.clients.views
    assert first.digest != other.digest


def test_gpu_time_charged_to_tenants_is_the_time_the_device_was_busy() -> None:
    simulation = Simulation(TOY, small_flood(1, Pace(TOY))[30:80])
    outcome = simulation.run()
    busy_us = sum(duration_us * count for duration_us, count in outcome.timeline.step_us.items())
    assert sum(usage.counters.gpu_us for usage in outcome.usages) == busy_us
    assert sum(second.busy_us for second in outcome.timeline.seconds.values()) == busy_us
    assert sum(simulation.scheduler.charges_us().values()) == simulation.scheduler.load(0).busy_us == busy_us


def test_the_last_line_is_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--story", "flood", "--seed", "2", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("interactive") for line in lines)
    found = json.loads(lines[-1])
    assert found["books_balanced"]
    row = found["classes"]["batch"]
    assert {"requests", "completed", "shed", "ttft_ms", "itl_ms", "queue_wait_ms", "tokens_per_s"} <= set(row)
    for durations in ("ttft_ms", "itl_ms", "queue_wait_ms"):
        assert set(row[durations]) == {"p50", "p95", "p99", "max"}
    assert set(found["tenants"]) == {"aurora", "bulk", "nova"}
    assert {"gpu_s", "tokens"} <= set(found["tenants"]["nova"])
    assert set(found["fairness_gap_ms"]) == {"max", "bound"}
    assert {"preemptions", "recomputed_tokens", "goodput_per_s", "retry_promise_kept", "digest"} <= set(found)


def test_one_class_or_tenant_can_be_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--alone", "batch", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["classes"]) == {"batch"}
    assert simulate.main(["--alone", "nova", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["tenants"]) == {"nova"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--story", "fairy-tale"], "fairy-tale"),
        (["--device", "abacus"], "abacus"),
        (["--alone", "stranger"], "nobody in flood has the class or tenant 'stranger'"),
        (["--noise-percent", "-3"], "--noise-percent"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        simulate.main(arguments)
    assert words in capsys.readouterr().err


def test_classes_without_requests_are_not_reported() -> None:
    outcome = Simulation(TOY, []).run()
    assert report(outcome, story="none", seed=0)["classes"] == {}
    assert outcome.clients.of_class(PriorityClass.BATCH).requests == 0


@pytest.mark.parametrize("story", ["long_decodes", "mixed_day", "overload", "tenant_flood"])
@pytest.mark.parametrize("device", ["cpu-smollm2", "toy"])
def test_every_request_of_a_story_fits_on_every_device(story: str, device: str) -> None:
    profile = DEVICES[device]
    for arrival in STORIES[story].tell(1, Pace(profile)):
        submit = arrival.submit
        length = len(submit.prompt_token_ids) + submit.max_tokens
        assert length <= profile.shape.max_model_len
        assert length <= profile.shape.num_blocks * profile.shape.block_size * 94 // 100


def test_a_story_is_told_in_order_with_each_response_once() -> None:
    for story in STORIES.values():
        arrivals = story.tell(5, Pace(H200))
        assert [each.at_us for each in arrivals] == sorted(each.at_us for each in arrivals)
        assert len({each.submit.response_id for each in arrivals}) == len(arrivals)


def test_the_flood_is_5000_long_prompts_at_once_and_chats_in_bursts_and_the_same_for_a_seed() -> None:
    arrivals = flood(1, Pace(H200))
    bulk = [arrival for arrival in arrivals if arrival.submit.tenant_id == "bulk"]
    chats = [arrival for arrival in arrivals if arrival.submit.tenant_id in ("aurora", "nova")]
    assert len(bulk) == 5_000
    assert {arrival.at_us for arrival in bulk} == {0}
    assert all(3_072 <= len(arrival.submit.prompt_token_ids) <= 5_120 for arrival in bulk)
    assert len(chats) > 1_000
    assert [arrival.at_us for arrival in flood(1, Pace(H200))] == [arrival.at_us for arrival in arrivals]
    assert [arrival.at_us for arrival in flood(2, Pace(H200))] != [arrival.at_us for arrival in arrivals]


def test_a_tenant_drops_a_thousand_chats_into_the_class_of_a_quiet_one() -> None:
    arrivals = tenant_flood(1, Pace(H200))
    nova = [each.at_us for each in arrivals if each.submit.tenant_id == "nova"]
    assert len(nova) == 1_000
    assert max(nova) - min(nova) < 100_000
    assert {each.submit.priority_class for each in arrivals} == {PriorityClass.INTERACTIVE}
    assert 70 < len(arrivals) - len(nova) < 130


def test_in_the_overload_three_tenants_of_different_value_ask_alike_within_one_second() -> None:
    chats = [each.submit for each in overload(1, Pace(H200)) if each.submit.priority_class is PriorityClass.INTERACTIVE]
    assert {(submit.tenant_id, submit.value_micros) for submit in chats} == {
        ("gold", 100),
        ("silver", 10),
        ("bronze", 1),
    }
    assert {submit.remaining_hard_deadline_us for submit in chats} == {1_000_000}


def test_a_pace_leaves_the_reference_as_it_is_and_keeps_ratios_elsewhere() -> None:
    assert [Pace(H200).tokens(4_096), Pace(H200).us(1_000_000)] == [4_096, 1_000_000]
    toy = Pace(TOY)
    assert [toy.tokens(3_125), toy.tokens(6_250), toy.tokens(1)] == [512, 1_024, 1]
    slow = Pace(DEVICES["cpu-smollm2"])
    assert slow.us(2_000_000) // 2 == slow.us(1_000_000) > 2_000_000


def test_a_refused_client_comes_back_when_told_to_as_the_same_request() -> None:
    submit = submit_of("chat-1", "aurora", PriorityClass.INTERACTIVE, prompt_tokens=4, max_tokens=2)
    second = Arrival(0, submit, num_tries=3).again(at_us=900)
    third = second.again(at_us=1_900)
    assert [(each.at_us, each.submit.response_id, each.num_tries) for each in (second, third)] == [
        (900, "chat-1~2", 2),
        (1_900, "chat-1~3", 1),
    ]
