"""Pauses at the policy desk: at once, on record, and ended as they began."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_an_edit_may_end_a_pause_and_a_later_edit_that_takes_the_class_away_leaves_no_pause(house: Any) -> None:
    house.alice.post(f"/operator/policy/pause/{house.tenant.id}/default", {"action": "pause"})
    box = f"{house.tenant.id}.default.allowed"
    for is_allowed in (True, False):
        form = {name: value for name, value in form_of(house.alice).items() if name != box}
        answer = house.alice.post("/operator/policy/", form | ({box: "on"} if is_allowed else {}))
        act(house.alice, PolicyProposal.objects.get(id=answer["Location"].split("/")[-1]), action="send")
        assert QuotaPolicy.objects.get(priority_class="default").allowed is is_allowed
    assert ">Resume<" not in house.alice.get("/operator/policy/").content.decode()


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


def test_an_edit_that_would_end_a_pause_says_so_on_its_page(house: Any) -> None:
    house.bob.post(f"/operator/policy/pause/{house.tenant.id}/default", {"action": "pause"})
    form = form_of(house.alice) | {f"{house.tenant.id}.default.allowed": "on"}
    page = house.alice.post("/operator/policy/", form, follow=True).content.decode()
    assert "<b>Aurora, default</b> is paused, by bob: this edit resumes it." in page
    page = act(house.alice, PolicyProposal.objects.get(), action="send")
    assert "this edit resumes it" not in page


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
