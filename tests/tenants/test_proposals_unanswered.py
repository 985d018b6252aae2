"""Edits that wait for their moment while whoever answers for them leaves: who approved one, or else who made it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.utils import timezone

from billing import services as billing
from billing.pricing import TokenPrices
from tenants import proposals, selectors
from tenants.models import AuditEvent, PolicyProposal, PolicyVersion
from tenants.policy_changes import Change

HOUR = timedelta(hours=1)
PRICES = {("m", "batch"): TokenPrices(prompt=1, cached=2, output=3)}
RIGHT_FOR = {"quotas": "change_quotapolicy", "prices": "change_price"}


def take(user: User, *rights: str) -> None:
    user.user_permissions.remove(*Permission.objects.filter(codename__in=rights))


def switch_off(user: User) -> None:
    user.is_active = False
    user.save()


def lower(user: User) -> None:
    user.is_staff = False
    user.save()


LOSSES: dict[str, tuple[Callable[[User, str], Any], str]] = {
    "switched off": (lambda user, subject: switch_off(user), "has been switched off"),
    "lowered": (lambda user, subject: lower(user), "is no operator any more"),
    "right taken": (lambda user, subject: take(user, RIGHT_FOR[subject]), "may not change {subject} any more"),
    "deleted": (lambda user, subject: user.delete(), "has no account any more"),
}
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_subject = pytest.mark.parametrize("subject", RIGHT_FOR)


@pytest.fixture
def staff(aurora: Any, operators: dict[str, User]) -> dict[str, User]:
    billing.set_prices(actor="tests", prices=PRICES)
    return operators


def drafted(subject: str, value: int = 7) -> PolicyProposal:
    current = selectors.current_policy()
    assert current is not None
    document, prices = selectors.live_policy(current.version), list[Change]()
    if subject == "prices":
        prices = billing.price_changes(PRICES, {("m", "batch"): TokenPrices(prompt=1, cached=2, output=value)})
    else:
        document["classes"]["batch"]["bypass_limit"] = value
    return proposals.draft(actor="ann", document=document, based_on=current.version, prices=prices)


def sent(proposal: PolicyProposal, wait: timedelta = HOUR) -> PolicyProposal:
    moment = timezone.now() + wait
    return proposals.send_off(actor="ann", proposal_id=proposal.id, reason="they pay more", effective_from=moment)


def scheduled(subject: str, settings: Any, *, is_approved: bool) -> PolicyProposal:
    """Ann's, and approved by Bob where approval is asked for."""
    settings.RUBATO_POLICY_NEEDS_APPROVAL = is_approved
    proposal = sent(drafted(subject))
    return proposals.approve(actor="bob", proposal_id=proposal.id) if is_approved else proposal


def due() -> list[PolicyProposal]:
    return proposals.apply_due(timezone.now() + 3 * HOUR)


@every_loss
@every_subject
@pytest.mark.parametrize("is_approved", [False, True], ids=["alone", "approved"])
def test_an_edit_that_nobody_answers_for_at_its_moment_is_refused_and_holds_up_no_other(
    staff: dict[str, User], settings: Any, loss: str, subject: str, is_approved: bool
) -> None:
    proposal = scheduled(subject, settings, is_approved=is_approved)
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    other = proposals.approve(actor="carl", proposal_id=sent(drafted("quotas", 77), 2 * HOUR).id)
    who, deed = ("bob", "approved") if is_approved else ("ann", "made")
    lose, lack = LOSSES[loss]
    assert proposals.unanswered(proposal) == ""
    lose(staff[who], subject)
    said = f"{who}, who {deed} it, {lack.format(subject=subject)}"
    assert proposals.unanswered(proposal) == said
    version = PolicyVersion.objects.latest("version").version
    assert [(one.id, one.state) for one in due()] == [(proposal.id, "refused"), (other.id, "applied")]
    proposal.refresh_from_db()
    assert proposal.outcome == f"nobody answers for it any more: {said}"
    assert PolicyVersion.objects.latest("version").version == version + 1
    event = AuditEvent.objects.filter(object_id=str(proposal.id)).latest("id")
    assert (event.actor, event.reason, event.after["state"]) == ("the platform", said, "refused")
    assert due() == []
    assert proposals.withdraw(actor="carl", proposal_id=proposal.id).state == "withdrawn"


@every_loss
@every_subject
def test_who_approved_an_edit_answers_for_it_where_its_maker_has_left(
    staff: dict[str, User], settings: Any, loss: str, subject: str
) -> None:
    scheduled(subject, settings, is_approved=True)
    LOSSES[loss][0](staff["ann"], subject)
    assert [one.state for one in due()] == ["applied"]


@pytest.mark.parametrize(("subject", "other"), [("quotas", "prices"), ("prices", "quotas")])
def test_a_right_that_an_edit_does_not_ask_for_is_not_missed(
    staff: dict[str, User], settings: Any, subject: str, other: str
) -> None:
    scheduled(subject, settings, is_approved=False)
    take(staff["ann"], RIGHT_FOR[other])
    assert [one.state for one in due()] == ["applied"]


def test_who_puts_anothers_edit_in_force_where_approval_is_asked_no_more_answers_for_it(
    staff: dict[str, User], settings: Any
) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = sent(drafted("quotas"))
    settings.RUBATO_POLICY_NEEDS_APPROVAL = False
    staff["ann"].delete()
    assert proposals.release(actor="bob", proposal_id=proposal.id).approved_by == "bob"
    assert [one.state for one in due()] == ["applied"]


def test_nobody_can_be_called_as_the_platform_signs() -> None:
    with pytest.raises(Exception, match="Enter a valid username"):
        User(username="the platform", password="x").full_clean()
