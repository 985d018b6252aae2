"""Pauses at the policy desk: at once, on record, and ended as they began."""

from __future__ import annotations

from typing import Any

import pytest

from billing.selectors import current_policy_document
from tenants import services
from tenants.models import AuditEvent, PolicyProposal, PolicyVersion, QuotaPolicy
from tests.gateway.desk_world import act, drafted, form_of, open_house


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


def test_an_emergency_pause_is_in_force_at_once_and_on_record(house: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    place = f"/operator/policy/pause/{house.tenant.id}/default"
    house.alice.post(place, {"action": "pause", "reason": "runaway"})
    assert QuotaPolicy.objects.get(priority_class="default").allowed is False
    assert PolicyVersion.objects.first().reason == "emergency: Aurora, default paused. runaway"
    event = AuditEvent.objects.filter(object_type="quotapolicy", action="update").first()
    assert event.reason == "emergency: Aurora, default paused. runaway"
    house.alice.post(place, {"action": "resume"})
    assert QuotaPolicy.objects.get(priority_class="default").allowed is True


def test_what_was_never_granted_is_offered_no_button_and_cannot_be_resumed(house: Any) -> None:
    place = f"/operator/policy/pause/{house.tenant.id}"
    before = house.alice.get("/operator/policy/").content.decode()
    assert (before.count(">Resume<"), before.count(">Pause<")) == (0, 1)
    page = house.alice.post(f"{place}/interactive", {"action": "resume"}, follow=True).content.decode()
    assert "interactive was not paused for Aurora: to grant it, tick it" in page
    page = house.alice.post(f"{place}/interactive", {"action": "pause"}, follow=True).content.decode()
    assert "interactive is not granted to Aurora: there is nothing to pause" in page
    assert [row.allowed for row in QuotaPolicy.objects.order_by("priority_class")] == [False, True, False]
    assert PolicyVersion.objects.count() == 1


def test_a_paused_class_is_resumed_once_and_keeps_its_limits(house: Any) -> None:
    place = f"/operator/policy/pause/{house.tenant.id}/default"
    act(house.alice, drafted(house.alice, default__concurrency="9"), action="send")
    page = house.alice.post(place, {"action": "pause"}, follow=True).content.decode()
    assert (page.count(">Resume<"), page.count(">Pause<")) == (1, 0)
    page = house.alice.post(place, {"action": "resume"}, follow=True).content.decode()
    assert (page.count(">Resume<"), page.count(">Pause<")) == (0, 1)
    assert "was not paused" in house.alice.post(place, {"action": "resume"}, follow=True).content.decode()
    assert QuotaPolicy.objects.get(priority_class="default").concurrency == 9


def drafted_with(house: Any, box: str, value: str) -> PolicyProposal:
    """An edit of one box of Aurora's, also of one that is not ticked."""
    form = form_of(house.alice) | {f"{house.tenant.id}.{box}": value}
    answer = house.alice.post("/operator/policy/", form)
    return PolicyProposal.objects.get(id=answer["Location"].split("/")[-1])


def row_of(priority_class: str = "default") -> tuple[bool, bool]:
    """Whether it is shown as let in, and whether it is paused."""
    row = QuotaPolicy.objects.get(priority_class=priority_class)
    return row.allowed, row.is_paused


def lets_in(priority_class: str = "default") -> bool:
    """By what gateways and workers are told."""
    cells: Any = current_policy_document()["policy"]
    return next(bool(cell["allowed"]) for cell in cells["tenants"] if cell["priority_class"] == priority_class)


def pause(house: Any, action: str = "pause", label: str = "default") -> str:
    place = f"/operator/policy/pause/{house.tenant.id}/{label}"
    page: str = house.bob.post(place, {"action": action}, follow=True).content.decode()
    return page


@pytest.mark.parametrize("is_open_before", [True, False], ids=["a page from before the pause", "a fresh page"])
def test_an_edit_that_takes_a_paused_class_away_is_made_and_leaves_nothing_to_resume(
    house: Any, is_open_before: bool
) -> None:
    box = f"{house.tenant.id}.default.allowed"
    before = form_of(house.alice)
    pause(house)
    form = before if is_open_before else form_of(house.alice)
    assert form.pop(box) == "on"
    page = house.alice.post("/operator/policy/", form, follow=True).content.decode()
    assert "<b>Aurora, default</b> is paused, by bob: this edit takes the class away" in page
    act(house.alice, PolicyProposal.objects.get(state="draft"), action="send")
    assert (row_of(), lets_in()) == ((False, False), False)
    assert "default was not paused for Aurora" in pause(house, "resume")
    assert not lets_in()


def test_an_edit_that_grants_what_a_colleague_has_granted_and_paused_since_leaves_the_pause(house: Any) -> None:
    """As one that was scheduled, or made in a page from before, comes into force."""
    first, second = (drafted_with(house, "interactive.allowed", "on") for _ in range(2))
    act(house.alice, second, action="send")
    pause(house, label="interactive")
    page = act(house.alice, first, action="send")
    assert "it stands already in version" in page
    assert (row_of("interactive"), lets_in("interactive")) == ((False, True), False)


def test_an_edit_of_a_paused_class_says_that_it_stays_paused_and_is_in_force_when_it_is_resumed(house: Any) -> None:
    pause(house)
    draft = drafted_with(house, "default.concurrency", "9")
    page = house.alice.get(f"/operator/policy/edits/{draft.id}").content.decode()
    act(house.alice, draft, action="send")
    assert (row_of(), lets_in()) == ((False, True), False)
    assert "<b>Aurora, default</b> is paused, by bob, and stays so until somebody resumes it" in page
    pause(house, "resume")
    assert (row_of(), lets_in()) == ((True, False), True)
    assert QuotaPolicy.objects.get(priority_class="default").concurrency == 9


def test_a_pause_is_a_change_of_its_version_and_no_conflict_of_any_edit(house: Any) -> None:
    draft = drafted(house.alice, default__weight="7")
    pause(house)
    page = house.alice.get(f"/operator/policy/versions/{PolicyVersion.objects.first().version}").content.decode()
    assert "<td>paused</td>" in page
    assert "In force" in act(house.alice, draft, action="send")
    assert (row_of(), lets_in()) == ((False, True), False)


def test_going_back_to_before_a_class_was_granted_takes_it_away_though_it_is_paused(house: Any) -> None:
    start = PolicyVersion.objects.first().version
    act(house.alice, drafted_with(house, "interactive.allowed", "on"), action="send")
    pause(house, label="interactive")
    house.alice.post(f"/operator/policy/versions/{start}", {"version": start + 2})
    act(house.alice, PolicyProposal.objects.get(state="draft"), action="send")
    assert row_of("interactive") == (False, False)
    assert "interactive was not paused for Aurora" in pause(house, "resume", "interactive")


def test_going_back_to_a_version_of_a_pause_grants_no_class_that_it_let_nobody_into(house: Any) -> None:
    act(house.alice, drafted(house.alice, default__weight="7"), action="send")
    pause(house)
    paused = PolicyVersion.objects.first().version
    form = form_of(house.alice, default__weight="3")
    del form[f"{house.tenant.id}.default.allowed"]
    house.alice.post("/operator/policy/", form)
    act(house.alice, PolicyProposal.objects.get(state="draft"), action="send")
    house.alice.post(f"/operator/policy/versions/{paused}", {"version": paused + 1})
    act(house.alice, PolicyProposal.objects.get(state="draft"), action="send")
    assert (row_of(), QuotaPolicy.objects.get(priority_class="default").weight) == ((False, False), 7)


def test_a_pause_asked_by_htmx_answers_with_the_button_as_it_is_then(house: Any) -> None:
    place = f"/operator/policy/pause/{house.tenant.id}/default"
    for action, then in (("pause", "Resume"), ("resume", "Pause"), ("resume", "Pause")):
        answer = house.alice.post(place, {"action": action}, headers={"HX-Request": "true"})
        page = answer.content.decode()
        assert (answer.status_code, page.count("<button"), f">{then}<" in page) == (200, 1, True)
    assert "default was not paused for Aurora" in page


def test_what_a_pause_asked_by_htmx_has_to_say_it_says_itself_and_on_no_later_page(house: Any) -> None:
    place = f"/operator/policy/pause/{house.tenant.id}/default"
    for action in ("pause", "resume"):
        answer = house.alice.post(place, {"action": action}, headers={"HX-Request": "true"})
        assert f"Aurora, default: {action}d." in answer.content.decode()
        assert "messages" not in answer.cookies
    assert "Aurora, default: " not in house.alice.get("/operator/policy/").content.decode()


def test_what_a_colleague_has_just_paused_is_paused_already_and_says_by_whom(house: Any) -> None:
    place = f"/operator/policy/pause/{house.tenant.id}/default"
    for who in (house.bob, house.alice, house.bob):  # whoever paused it last
        who.post(place, {"action": "pause"})
        page = house.alice.post(place, {"action": "pause"}, headers={"HX-Request": "true"}).content.decode()
        name = "alice" if who is house.alice else "bob"
        assert f"default is paused for Aurora already, by {name}" in page
        assert ">Resume<" in page
        house.alice.post(place, {"action": "resume"})


def test_going_back_leaves_paused_what_was_paused_since_and_says_so(house: Any) -> None:
    start = PolicyVersion.objects.first().version
    act(house.alice, drafted(house.alice, default__weight="7"), action="send")
    house.bob.post(f"/operator/policy/pause/{house.tenant.id}/default", {"action": "pause"})
    page = house.alice.get(f"/operator/policy/versions/{start}").content.decode()
    assert "<b>Aurora, default</b> is paused, by bob, and stays so until somebody resumes it" in page
    assert "<td>allowed</td>" not in page
    house.alice.post(f"/operator/policy/versions/{start}", {"version": start + 2})
    act(house.alice, PolicyProposal.objects.get(state="draft"), action="send", reason="it was better")
    row = QuotaPolicy.objects.get(priority_class="default")
    assert (row.weight, row.allowed, row.is_paused) == (1, False, True)
    page = house.alice.get(f"/operator/policy/versions/{start}").content.decode()
    assert "It would change nothing: the policy in force says the same, but for what is paused." in page


def test_a_tenant_that_is_switched_off_is_marked_and_has_nothing_to_pause(house: Any) -> None:
    def switch(is_active: bool) -> None:
        services.update_tenant(
            actor="tests", tenant_id=house.tenant.id, name="Aurora", timezone="UTC", is_active=is_active
        )

    place = f"/operator/policy/pause/{house.tenant.id}/default"
    switch(False)
    page = house.alice.get("/operator/policy/").content.decode()
    assert (page.count("switched off"), page.count(">Pause<"), "100.0&nbsp;%" in page) == (1, 0, False)
    page = house.alice.post(place, {"action": "pause"}, follow=True).content.decode()
    assert "Aurora is switched off: nobody of it is let in, in any class" in page
    assert QuotaPolicy.objects.get(priority_class="default").allowed is True
    switch(True)
    page = house.alice.get("/operator/policy/").content.decode()
    assert (page.count("switched off"), page.count(">Pause<"), "100.0&nbsp;%" in page) == (0, 1, True)
