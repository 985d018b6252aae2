"""What the page of an edit says when things have moved on: it does not fit any more, or somebody was quicker."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from tenants import proposals, selectors
from tenants.models import PolicyProposal
from tests.gateway.desk_world import act, drafted, open_house, weight

CLASSES = "/operator/policy/classes"
TOO_MUCH = "floor_percent of all classes must sum to at most 100, not 120"


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


def page_of(house: Any, proposal: PolicyProposal) -> str:
    return str(house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode())


def test_a_draft_that_does_not_fit_any_more_says_so_before_and_after_it_is_sent(house: Any) -> None:
    proposal = drafted(house.alice, CLASSES, batch__floor_percent="60")
    assert "does not fit" not in page_of(house, proposal)
    act(house.bob, drafted(house.bob, CLASSES, default__floor_percent="60"), action="send")
    assert "cannot come into force as it stands: classes: " + TOO_MUCH in page_of(house, proposal)
    page = act(house.alice, proposal, action="send", reason="nights are quiet")
    assert page.count(TOO_MUCH) == 2  # as an answer, and on the page
    assert ('<span class="role">draft</span>' in page, 'value="nights are quiet"' in page) == (True, True)
    assert "at its moment" not in page


def test_an_edit_that_is_to_come_and_does_not_fit_says_what_will_become_of_it_and_then_what_did(house: Any) -> None:
    proposal = drafted(house.alice, CLASSES, batch__floor_percent="60")
    act(house.bob, drafted(house.bob, CLASSES, default__floor_percent="60"), action="send")
    page = act(house.alice, proposal, action="send", effective_from="2100-01-01T08:00")
    assert "If that is so at its moment, it ends as a conflict and changes nothing." in page
    proposals.apply_due(timezone.now().replace(year=2101))
    assert "Make the edit again on the policy as it is now." in page_of(house, proposal)
    for page in (page_of(house, proposal), house.alice.get("/operator/policy/history").content.decode()):
        assert f"it does not fit what is in force: classes: {TOO_MUCH}" in page
    assert selectors.live_snapshot(0).classes[2].floor_percent == 5


def test_an_edit_that_nobody_answers_for_says_so_before_its_moment_and_after(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    act(house.alice, proposal, action="send", effective_from="2100-01-01T00:00")
    assert "Nobody answers" not in page_of(house, proposal)
    User.objects.filter(username="alice").update(is_active=False)
    place, said = f"/operator/policy/edits/{proposal.id}", "alice, who made it, has been switched off"
    assert f"Nobody answers for this edit any more: {said}. If" in house.bob.get(place).content.decode()
    proposals.apply_due(timezone.now().replace(year=2101))
    page = house.bob.get(place).content.decode()
    assert '<span class="role">refused</span>' in page
    assert f"It is not in force: nobody answers for it any more: {said}." in page
    assert said in house.bob.get("/operator/policy/history").content.decode()
    assert weight() == 1
    act(house.bob, proposal, action="withdraw")
    assert said not in house.bob.get("/operator/policy/history").content.decode()


@pytest.mark.parametrize("action", ["send", "approve", "release", "withdraw"])
@pytest.mark.parametrize("state", ["applied", "withdrawn"])
def test_whoever_acts_on_an_edit_too_late_reads_what_became_of_it_and_nothing_else(
    house: Any, action: str, state: str
) -> None:
    proposal = drafted(house.alice, default__weight="7")
    act(house.alice, proposal, action="send" if state == "applied" else "withdraw")
    said = {"applied": "has come into force already: version", "withdrawn": "has been withdrawn already, by alice"}
    page = act(house.bob, proposal, action=action)
    assert f"this edit {said[state]}" in page
    assert f'<span class="role">{state}</span>' in page
    assert "is withdrawn." not in page
    assert (weight(), PolicyProposal.objects.get(id=proposal.id).state) == (7 if state == "applied" else 1, state)


@pytest.mark.parametrize("moment", ["", "2100-01-01T08:00"], ids=["now", "later"])
@pytest.mark.parametrize("needs_approval", [False, True], ids=["alone", "with approval"])
@pytest.mark.parametrize("action", ["send", "approve", "release", "withdraw"])
def test_a_button_pressed_twice_says_both_times_what_became_of_the_edit(
    house: Any, settings: Any, action: str, needs_approval: bool, moment: str
) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = needs_approval or action in ("approve", "release")
    proposal, presser = drafted(house.alice, default__weight="7"), house.alice
    if action in ("approve", "release"):
        act(house.alice, proposal, action="send", effective_from=moment)
        settings.RUBATO_POLICY_NEEDS_APPROVAL, presser = action == "approve", house.bob
    first, second = (act(presser, proposal, action=action, effective_from=moment) for _ in range(2))
    said = [re.findall(r'<p class="(notice[^"]*)">([^<]*)</p>', page.partition("<h1")[0]) for page in (first, second)]
    assert said[0] == said[1]
    ((tone, words),) = said[0]
    assert tone == "notice good"
    assert words.startswith(("In force: version", "The edit waits for", "The edit is withdrawn."))


@pytest.mark.parametrize(
    "other", [{"reason": "they pay less"}, {"effective_from": "2100-01-01T08:00"}, {"effective_from": "tomorrow"}]
)
def test_an_edit_that_is_sent_again_in_other_words_is_refused(house: Any, other: dict[str, str]) -> None:
    proposal = drafted(house.alice, default__weight="7")
    act(house.alice, proposal, action="send")
    page = act(house.alice, proposal, action="send", **other)
    assert "this edit has come into force already: version 2" in page or "write the moment as" in page
    assert PolicyProposal.objects.get(id=proposal.id).reason == "they pay more"


@pytest.mark.parametrize("text", ["tomorrow", "2020-01-01T00:00", "2100-13-45T08:00"])
def test_a_moment_that_is_refused_leaves_the_form_as_it_was(house: Any, text: str) -> None:
    proposal = drafted(house.alice, default__weight="7")
    page = act(house.alice, proposal, action="send", reason="they & we", effective_from=text)
    assert 'id="reason" name="reason" type="text" maxlength="1000" value="they &amp; we"' in page
    assert f'type="datetime-local" value="{text}"' in page
    assert 'data-unsaved="kept"' in page
