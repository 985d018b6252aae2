"""Replays on the page of an edit: which edits are replayed, on what policy, and what the page says of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.desk.preview import Preview, Previews
from tenants.models import PolicyProposal
from tests.gateway.desk_world import act, drafted, open_house


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


def test_a_replay_of_no_request_says_that_there_was_none_and_can_be_asked_for_again(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    nothing: dict[str, Any] = {"classes": {}, "tenants": {}}
    result = {"seconds": 2_445, "draws": 1, "happened": nothing, "model": nothing, "what_if": nothing}
    Previews()._keep(str(proposal.id), Preview("done", result=result | {"error_percent": {}}))
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert "Nothing was recorded: no request came in that time" in page
    assert "40 min" not in page
    assert "error of this preview" not in page
    assert ">Replay the hour</button>" in page


@pytest.mark.parametrize("state", ["applied", "withdrawn", "conflict"])
@pytest.mark.parametrize("headers", [{}, {"HX-Request": "true"}], ids=["page", "fragment"])
def test_an_edit_that_cannot_come_into_force_any_more_is_not_replayed(
    house: Any, state: str, headers: dict[str, str]
) -> None:
    proposal = drafted(house.alice, default__weight="7")
    PolicyProposal.objects.filter(id=proposal.id).update(state=state)
    place = f"/operator/policy/edits/{proposal.id}/preview"
    page = house.alice.post(place, {"action": "start"}, headers=headers, follow=True).content.decode()
    assert f"This edit is {state}: only one that may still come into force is replayed." in page
    assert "Replay the hour" not in page
    assert Previews().find(str(proposal.id)) is None


def test_a_replay_judges_the_edit_made_to_the_policy_in_force(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[Any] = []
    monkeypatch.setattr(Previews, "start", lambda previews, draft_id, document, minutes: replayed.append(document))
    proposal = drafted(house.alice, default__weight="7")
    act(house.bob, drafted(house.bob, default__concurrency="9"), action="send")
    house.alice.post(f"/operator/policy/edits/{proposal.id}/preview", {"action": "start"})
    (row,) = [row for row in replayed[0]["tenants"] if row["priority_class"] == "default"]
    assert (row["weight"], row["concurrency"]) == (7, 9)


@pytest.mark.parametrize(("num_unserved", "is_said"), [(0, False), (1_234, True)])
def test_a_replay_says_how_many_still_waited_when_the_recording_ended(
    house: Any, num_unserved: int, is_said: bool
) -> None:
    proposal = drafted(house.alice, default__weight="7")
    row = {"requests": 5, "refused": {}, "ttft_ms": {"p50": 274.0, "p99": None}, "tokens_per_s": 1.0}
    runs = {"classes": {"batch": {**row, "preemptions": {}, "step_time_holds": 0}}, "tenants": {}}
    result = {"seconds": 300, "draws": 1, "happened": runs, "model": runs, "what_if": runs, "error_percent": {}}
    Previews()._keep(str(proposal.id), Preview("done", result=result | {"unserved": num_unserved}))
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert ("When the recording ended, 1,234 requests still waited for a first token" in page) == is_said


@pytest.mark.parametrize("num_starts", [0, 2])
@pytest.mark.parametrize("is_anything_replayed", [False, True], ids=["nothing", "something"])
def test_a_replay_says_where_the_worker_was_started_anew_and_what_it_leaves_out(
    house: Any, num_starts: int, is_anything_replayed: bool
) -> None:
    proposal = drafted(house.alice, default__weight="7")
    row = {"requests": 5, "refused": {}, "ttft_ms": {"p50": 274.0, "p99": None}, "tokens_per_s": 1.0}
    runs = {"classes": {"batch": {**row, "preemptions": {}, "step_time_holds": 0}}, "tenants": {}}
    runs = runs if is_anything_replayed else {"classes": {}, "tenants": {}}
    result = {"seconds": 300, "draws": 1, "happened": runs, "model": runs, "what_if": runs, "error_percent": {}}
    result |= {"unserved": 0, "starts_unix_us": [1_796_102_718_000_000, 1_796_103_706_000_000][:num_starts]}
    why = "another version of the engine decided then"
    result |= {"left_out": [{"began_unix_us": 1_796_101_841_000_000, "requests": 1_234, "why": why}][:num_starts]}
    Previews()._keep(str(proposal.id), Preview("done", result=result))
    page = re.sub("<[^>]*>", "", house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode())
    moments = "(2026-12-01 05:25:18 UTC, 2026-12-01 05:41:46 UTC)"
    assert (f"The worker was started anew meanwhile {moments}:" in page) == (num_starts > 0 and is_anything_replayed)
    said = "Left out: 1,234 requests of an earlier start of the worker, recorded from 2026-12-01 05:10:41 UTC on."
    assert (f"{said} Another version of the engine decided then." in page) == (num_starts > 0)
