"""Policy edits that wait, are approved, collide, and are taken back."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from tenants import audit, proposals, selectors, services
from tenants.models import AuditEvent, PolicyProposal, PolicyVersion, QuotaPolicy
from tenants.policy_changes import Change, Conflict, carried_over, conflicts, diff

SOON = timedelta(hours=1)

pytestmark = pytest.mark.usefixtures("operators")


def now_in_force() -> selectors.StoredPolicy:
    found = selectors.current_policy()
    assert found is not None
    return found


def edited(place: str = "class batch", **fields: Any) -> dict[str, Any]:
    """The policy in force with some fields of one class changed."""
    document = copy.deepcopy(now_in_force().policy)
    document["classes"][place.removeprefix("class ")].update(fields)
    return document


def propose(actor: str = "ann", wait: timedelta | None = SOON, **fields: Any) -> PolicyProposal:
    moment = None if wait is None else timezone.now() + wait
    return proposals.propose(
        actor=actor,
        document=edited(**fields),
        based_on=now_in_force().version,
        reason="they pay more",
        effective_from=moment,
    )


def later() -> list[PolicyProposal]:
    return proposals.apply_due(timezone.now() + 2 * SOON)


def floor() -> int:
    return now_in_force().policy["classes"]["batch"]["floor_percent"]


def save_weight(account: Any, weight: int, label: str = "default") -> Any:
    (row,) = QuotaPolicy.objects.filter(tenant=account.tenant, priority_class=label)
    policy = replace(selectors.tenant_class_policy(row), weight=weight)
    return services.save_quotas(actor="bob", policies=[policy])


def test_an_edit_waits_for_its_moment_and_is_applied_once(aurora: Any) -> None:  # P75
    proposal = propose(floor_percent=7)
    before = now_in_force().version
    assert proposals.apply_due(timezone.now()) == []
    later()
    later()
    assert (floor(), now_in_force().version) == (7, before + 1)
    proposal.refresh_from_db()
    assert (proposal.state, proposal.outcome) == ("applied", f"version {before + 1}")


def test_an_edit_without_a_moment_is_in_force_at_once(aurora: Any) -> None:
    assert propose(wait=None, floor_percent=7).state == "applied"
    assert floor() == 7


def test_with_approval_on_nothing_happens_until_a_second_person_agrees(aurora: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = propose(wait=None, floor_percent=7)
    assert later() == []
    with pytest.raises(ValidationError, match="cannot approve it"):
        proposals.approve(actor="ann", proposal_id=proposal.id)
    assert floor() == 5
    assert proposals.approve(actor="bob", proposal_id=proposal.id).state == "applied"
    assert floor() == 7


def test_an_approved_edit_still_waits_for_its_moment(aurora: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = propose(floor_percent=7)
    assert proposals.approve(actor="bob", proposal_id=proposal.id).state == "waiting"
    assert [one.state for one in later()] == ["applied"]


def test_an_edit_made_meanwhile_elsewhere_is_kept(aurora: Any) -> None:
    propose(floor_percent=7)
    save_weight(aurora, 9)
    later()
    cells = {row["priority_class"]: row["weight"] for row in now_in_force().policy["tenants"]}
    assert (floor(), cells["default"]) == (7, 9)


def test_an_edit_of_the_same_field_made_meanwhile_is_a_conflict_and_stays(aurora: Any) -> None:
    proposal = propose(floor_percent=7)
    propose(wait=None, floor_percent=6)
    later()
    proposal.refresh_from_db()
    assert (proposal.state, floor()) == ("conflict", 6)
    assert "class batch: floor_percent" in proposal.outcome


def test_a_withdrawn_edit_never_happens(aurora: Any) -> None:
    proposal = propose(floor_percent=7)
    proposals.withdraw(actor="ann", proposal_id=proposal.id)
    assert (later(), floor()) == ([], 5)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"floor_percent": -1}, "floor_percent must be an integer from 0 to 100"),
        ({"floor_percent": 90}, "must sum to at most 100"),
        ({"nonsense": 1}, "unknown field 'nonsense'"),
        ({}, "changes nothing"),
    ],
)
def test_an_edit_the_engine_would_refuse_is_refused_when_proposed(aurora: Any, fields: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        propose(**fields)
    assert not PolicyProposal.objects.exists()


def test_an_edit_of_a_version_that_never_was_is_refused(aurora: Any) -> None:
    with pytest.raises(ValidationError, match="no policy version 99"):
        proposals.propose(actor="ann", document=edited(floor_percent=7), based_on=99, reason="they pay more")


def go_back(to_version: int, seen: int | None = None) -> PolicyProposal:
    drafted = proposals.draft_back(actor="ann", to_version=to_version, based_on=seen or now_in_force().version)
    return proposals.send_off(actor="ann", proposal_id=drafted.id, reason=drafted.reason)


def test_going_back_makes_the_next_version_equal_to_an_older_one(aurora: Any) -> None:
    start = now_in_force()
    propose(wait=None, floor_percent=7)
    save_weight(aurora, 9)
    assert go_back(start.version).state == "applied"
    back = PolicyVersion.objects.latest("version")
    assert diff(start.policy, back.document) == []
    assert (back.version, back.reason) == (start.version + 3, f"back to version {start.version}")
    assert QuotaPolicy.objects.get(tenant=aurora.tenant, priority_class="default").weight == 1


def test_going_back_leaves_tenants_alone_that_came_later(aurora: Any) -> None:
    start = now_in_force()
    save_weight(aurora, 9)
    made = services.create_tenant(actor="tests", slug="late", name="Late")
    go_back(start.version)
    assert QuotaPolicy.objects.filter(tenant=made, priority_class="default", allowed=True).exists()


def test_going_back_waits_for_a_second_person_like_any_edit(aurora: Any, settings: Any) -> None:
    start = now_in_force()
    propose(wait=None, floor_percent=7)
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = go_back(start.version)
    assert (proposal.state, floor()) == ("waiting", 7)
    proposals.approve(actor="bob", proposal_id=proposal.id)
    assert floor() == 5


def test_going_back_is_a_conflict_where_somebody_has_edited_the_same_field_since(aurora: Any) -> None:
    start = now_in_force()
    propose(wait=None, floor_percent=7)
    seen = now_in_force().version
    propose(wait=None, floor_percent=6)
    assert (go_back(start.version, seen).state, floor()) == ("conflict", 6)


@pytest.mark.parametrize("reason", ["", " \n"])
def test_no_edit_is_sent_off_without_a_reason(aurora: Any, reason: str) -> None:
    drafted = proposals.draft(actor="ann", document=edited(floor_percent=7), based_on=now_in_force().version)
    with pytest.raises(ValidationError, match="with its reason"):
        proposals.send_off(actor="ann", proposal_id=drafted.id, reason=reason)
    assert floor() == 5


def test_the_reason_of_an_edit_is_on_record_whoever_puts_it_in_force(aurora: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = propose(wait=None, floor_percent=7)
    with audit.request("req_of_the_approval"):
        proposals.approve(actor="bob", proposal_id=proposal.id)
    event = AuditEvent.objects.filter(object_type="priorityclass", action="update").latest("id")
    assert (event.actor, event.reason, event.request_id) == ("ann", "they pay more", "req_of_the_approval")


def test_an_edit_that_waited_for_approval_is_released_once_nobody_asks_for_it(aurora: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = propose(wait=None, floor_percent=7)
    with pytest.raises(ValidationError, match="second person"):
        proposals.release(actor="ann", proposal_id=proposal.id)
    settings.RUBATO_POLICY_NEEDS_APPROVAL = False
    assert later() == []
    assert proposals.release(actor="ann", proposal_id=proposal.id).state == "applied"
    assert floor() == 7


def test_what_waits_for_its_moment_is_not_released_before(aurora: Any) -> None:
    proposal = propose(floor_percent=7)
    with pytest.raises(ValidationError, match="for its moment"):
        proposals.release(actor="ann", proposal_id=proposal.id)
    assert floor() == 5


def test_a_difference_names_place_field_before_and_after(aurora: Any) -> None:
    before = now_in_force().policy
    assert diff(before, edited(floor_percent=7)) == [Change("class batch", "floor_percent", 5, 7)]
    assert diff(before, {**before, "version": 99}) == []


def test_the_same_edit_twice_is_no_conflict(aurora: Any) -> None:
    start = now_in_force().policy
    ours, theirs = diff(start, edited(floor_percent=7)), diff(start, edited(floor_percent=6))
    assert conflicts(ours, ours) == []
    assert conflicts(ours, theirs) == [Conflict("class batch", "floor_percent", 6, 7)]


def test_an_edit_is_carried_over_without_touching_its_source(aurora: Any) -> None:
    start = now_in_force().policy
    moved = carried_over(diff(start, edited(floor_percent=7)), start)
    assert (moved["classes"]["batch"]["floor_percent"], start["classes"]["batch"]["floor_percent"]) == (7, 5)
    gone = Change("00000000-0000-0000-0000-000000000000 batch", "weight", 1, 2)
    assert carried_over([gone], start) == start
