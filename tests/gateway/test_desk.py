"""Edits of the policy at the desk: how one is seen, sent off, approved, undone, and by whom."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_engine.policy import PriorityClass as ClassName
from tenants import selectors, services
from tenants.models import AuditEvent, PolicyProposal, PolicyVersion, QuotaPolicy
from tests.gateway.desk_world import act, drafted, form_of, open_house, weight

LEFT = {"weight": "many", "concurrency": "", "money_micros": "5 000", "money_window": "day", "overflow_to": "batch"}


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


def test_an_edit_is_seen_first_and_then_put_in_force(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert re.search(r"Aurora, default</th><td>weight</td><td>1</td><td>7</td>", page)
    assert weight() == 1
    assert "In force: version" in act(house.alice, proposal, action="send", reason="they pay more")
    assert weight() == 7
    event = AuditEvent.objects.filter(object_type="quotapolicy", action="update").first()
    assert (event.actor, event.reason[:4], event.after) == ("alice", "they", {"weight": 7})
    assert PolicyVersion.objects.first().reason == "they pay more"


def test_class_parameters_are_edited_the_same_way(house: Any) -> None:
    proposal = drafted(house.alice, "/operator/policy/classes", batch__floor_percent="7")
    act(house.alice, proposal, action="send")
    assert selectors.live_snapshot(0).classes[ClassName.BATCH].floor_percent == 7


def test_a_wrong_box_keeps_what_was_typed_and_says_what_would_be_right(house: Any) -> None:
    answer = house.alice.post("/operator/policy/", form_of(house.alice, default__weight="many"))
    page = answer.content.decode()
    assert 'value="many"' in page
    assert "a whole number from 1 to 1,000,000" in page
    assert "Nothing was saved. One field needs another value: what it may be is written below it." in page
    assert not PolicyProposal.objects.exists()


@pytest.mark.parametrize("is_allowed", [True, False], ids=["ticked", "unticked"])
def test_a_wrong_box_keeps_every_other_one_as_it_was_left(house: Any, is_allowed: bool) -> None:
    ticks = {f"{house.tenant.id}.default.allowed": "on"} if is_allowed else {}
    form = {name: text for name, text in form_of(house.alice).items() if not name.endswith(".allowed")}
    left = {f"{house.tenant.id}.default.{name}": text for name, text in LEFT.items()}
    page = house.alice.post("/operator/policy/", form | left | ticks).content.decode()
    boxes = {box.split('"')[1]: box for box in re.findall(r"<(?:input|select)[^>]* (name=.*?</td>)", page, re.S)}
    place = f"{house.tenant.id}.default."
    assert (" checked" in boxes[place + "allowed"]) is is_allowed
    for name in ("money_window", "overflow_to"):
        assert f"<option selected>{LEFT[name]}<" in boxes[place + name]
    for name in ("weight", "concurrency", "money_micros"):
        assert f'value="{LEFT[name]}"' in boxes[place + name]


def test_a_form_that_changes_nothing_says_so(house: Any) -> None:
    page = house.alice.post("/operator/policy/", form_of(house.alice)).content.decode()
    assert "this edit changes nothing" in page


def test_two_admins_who_edit_the_same_field_meet_at_a_conflict(house: Any) -> None:
    first, second = drafted(house.alice, default__weight="7"), drafted(house.bob, default__weight="9")
    act(house.alice, first, action="send")
    page = act(house.bob, second, action="send")
    assert "Somebody has edited the same since" in page
    assert (weight(), PolicyProposal.objects.get(id=second.id).state) == (7, "conflict")


def test_an_edit_that_came_too_late_is_thrown_away_from_its_page(house: Any) -> None:
    first, second = drafted(house.alice, default__weight="7"), drafted(house.bob, default__weight="9")
    act(house.alice, first, action="send")
    assert "Throw it away" in act(house.bob, second, action="send")
    assert str(second.id) not in act(house.bob, second, action="withdraw")
    assert (weight(), PolicyProposal.objects.get(id=second.id).state) == (7, "withdrawn")


def test_two_edits_that_say_the_same_make_one_version(house: Any) -> None:
    first, second = drafted(house.alice, default__weight="7"), drafted(house.bob, default__weight="7")
    act(house.alice, first, action="send")
    saved = PolicyVersion.objects.first().version
    assert f"In force: it stands already in version {saved}." in act(house.bob, second, action="send")
    assert (weight(), PolicyVersion.objects.first().version) == (7, saved)
    assert PolicyProposal.objects.get(id=second.id).state == "applied"


@pytest.mark.parametrize("form", [{}, {"action": ""}, {"action": "delete"}], ids=["none", "empty", "unknown"])
def test_what_cannot_be_done_with_an_edit_is_no_good_request(house: Any, form: dict[str, str]) -> None:
    proposal = drafted(house.alice, default__weight="7")
    answer = house.alice.post(f"/operator/policy/edits/{proposal.id}", {"reason": "they pay more", **form})
    assert answer.status_code == 400
    assert (weight(), PolicyProposal.objects.get(id=proposal.id).state) == (1, "draft")


def test_two_admins_who_edit_different_fields_both_get_theirs(house: Any) -> None:
    first, second = drafted(house.alice, default__weight="7"), drafted(house.bob, default__concurrency="9")
    act(house.alice, first, action="send")
    act(house.bob, second, action="send")
    row = QuotaPolicy.objects.get(priority_class="default")
    assert (row.weight, row.concurrency) == (7, 9)


def test_a_conflict_names_the_tenant_and_not_its_number(house: Any) -> None:
    first, second = drafted(house.alice, default__weight="7"), drafted(house.bob, default__weight="9")
    act(house.alice, first, action="send")
    page = act(house.bob, second, action="send")
    assert "edited by somebody else since: Aurora, default: weight" in page
    assert '<th scope="row">Aurora, default</th><td>weight</td><td>7</td><td>9</td>' in page
    assert str(house.tenant.id) not in page


def test_new_tenants_do_not_hide_what_people_edited(house: Any) -> None:
    act(house.alice, drafted(house.alice, default__weight="7"), action="send", reason="they pay more")
    for number in range(60):
        services.create_tenant(actor="tests", slug=f"t{number}", name=f"T{number}")
    page = house.alice.get("/operator/policy/history").content.decode()
    assert "they pay more" in page
    assert " is new." not in page
    everything = house.alice.get("/operator/policy/history?all=1").content.decode()
    assert everything.count(" is new.") == 50
    (address,) = re.findall(r'href="(\?before=[^"]+)">Older', everything)
    older = house.alice.get("/operator/policy/history" + address.replace("&amp;", "&")).content.decode()
    assert (older.count(" is new."), "they pay more" in older) == (11, True)


def test_nobody_sends_off_the_draft_of_another(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    assert "this draft is alice&#x27;s" in act(house.bob, proposal, action="send")
    assert weight() == 1


def test_with_approval_on_another_person_puts_it_in_force(house: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = drafted(house.alice, default__weight="7")
    assert "The edit waits for somebody" in act(house.alice, proposal, action="send")
    assert "cannot approve it" in act(house.alice, proposal, action="approve")
    assert "In force" in act(house.bob, proposal, action="approve")
    assert weight() == 7


def test_a_moment_in_the_future_is_waited_for(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    act(house.alice, proposal, action="send", effective_from="2100-01-01T08:00")
    found = PolicyProposal.objects.get(id=proposal.id)
    assert (found.state, found.effective_from) == ("waiting", datetime(2100, 1, 1, 8, tzinfo=UTC))
    assert "is withdrawn" in act(house.bob, proposal, action="withdraw")
    assert weight() == 1


@pytest.mark.parametrize("text", ["tomorrow", "2100-13-45T08:00", "9999-12-31T23:59-14:00"])
def test_a_moment_that_is_none_is_refused(house: Any, text: str) -> None:
    proposal = drafted(house.alice, default__weight="7")
    assert "From: write the moment as" in act(house.alice, proposal, action="send", effective_from=text)


def test_a_moment_that_is_past_is_refused_and_the_minute_under_way_is_not(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposal = drafted(house.alice, default__weight="7")
    page = act(house.alice, proposal, action="send", effective_from="2020-01-01T00:00")
    assert "From: 2020-01-01 00:00 UTC is past. Name a moment to come, or none for now." in page
    assert (weight(), PolicyProposal.objects.get(id=proposal.id).state) == (1, "draft")
    clock = SimpleNamespace(now=lambda: datetime(2099, 5, 1, 8, 0, 59, tzinfo=UTC))
    monkeypatch.setattr("gateway.desk.edits.timezone", clock)
    act(house.alice, proposal, action="send", effective_from="2099-05-01T07:59")
    assert PolicyProposal.objects.get(id=proposal.id).state == "draft"
    act(house.alice, proposal, action="send", effective_from="2099-05-01T08:00")
    assert PolicyProposal.objects.get(id=proposal.id).state == "waiting"


def test_a_reason_with_a_nul_is_kept_without_it(house: Any) -> None:
    act(house.alice, drafted(house.alice, default__weight="7"), action="send", reason="they\0 pay")
    assert PolicyVersion.objects.first().reason == "they pay"


def test_going_back_is_shown_first_and_is_then_an_edit_like_any_other(house: Any) -> None:
    start = PolicyVersion.objects.first().version
    act(house.alice, drafted(house.alice, default__weight="7"), action="send")
    page = house.alice.get(f"/operator/policy/versions/{start}").content.decode()
    assert re.search(r"<td>weight</td><td>7</td><td>1</td>", page)
    answer = house.alice.post(f"/operator/policy/versions/{start}", {"version": start + 1})
    proposal = PolicyProposal.objects.get(state="draft")
    assert answer["Location"].endswith(str(proposal.id))
    page = house.alice.get(answer["Location"]).content.decode()
    assert f'value="back to version {start}"' in page
    assert weight() == 7
    act(house.alice, proposal, action="send", reason="it was better")
    assert (weight(), PolicyVersion.objects.first().reason) == (1, "it was better")
    same = house.alice.post(f"/operator/policy/versions/{start}", {"version": start + 2}, follow=True)
    assert "this edit changes nothing" in same.content.decode()


def test_with_approval_on_no_way_puts_an_edit_in_force_alone(house: Any, settings: Any) -> None:
    start = PolicyVersion.objects.first().version
    act(house.alice, drafted(house.alice, default__weight="7"), action="send")
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    house.alice.post(f"/operator/policy/versions/{start}", {"version": start + 1})
    back = PolicyProposal.objects.get(state="draft")
    for action in ("send", "approve", "release"):
        act(house.alice, back, action=action)
    assert weight() == 7
    act(house.bob, back, action="approve")
    assert weight() == 1


def test_an_edit_that_waits_says_who_must_do_what(house: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = drafted(house.alice, default__weight="7")
    place = f"/operator/policy/edits/{proposal.id}"
    page = house.alice.get(place).content.decode()
    assert ">Send it for approval</button>" in page
    assert "Put it in force" not in page
    assert "The edit waits for somebody else&#x27;s approval." in act(house.alice, proposal, action="send")
    mine, theirs = (who.get(place).content.decode() for who in (house.alice, house.bob))
    assert "somebody else who may change quotas has to open this page and press Approve" in mine
    assert ">Approve</button>" not in mine
    assert "you may give it: alice made it" in theirs
    assert ">Approve</button>" in theirs
    settings.RUBATO_POLICY_NEEDS_APPROVAL = False
    assert "approval is no longer asked for" in house.alice.get(place).content.decode()
    assert "In force" in act(house.alice, proposal, action="release")
    assert weight() == 7


def test_an_edit_without_a_reason_is_not_put_in_force(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    assert "on record with its reason" in act(house.alice, proposal, action="send", reason=" ")
    assert weight() == 1


def test_going_back_without_a_word_of_what_was_seen_changes_nothing_and_says_so(house: Any) -> None:
    start = PolicyVersion.objects.first().version
    act(house.alice, drafted(house.alice, default__weight="7"), action="send")
    for form in ({}, {"version": "x"}, {"version": "0"}):
        page = house.alice.post(f"/operator/policy/versions/{start}", form, follow=True).content.decode()
        assert "The form did not say which version was in force when you looked" in page
    assert weight() == 7
