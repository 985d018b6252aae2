"""Edits of policy and prices that wait for their moment or for a second person; going back to an older version of the
policy is one of them.

An edit is carried over to whatever policy is in force when it is due; where somebody has edited the same field
since, or where at its moment it does not fit, it ends as a conflict and changes nothing. Where nobody answers for it
any more at its moment, it is refused: who approved it does, or else who made it. Every act on an edit is one
transaction: what is refused has changed nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import InterfaceError, OperationalError
from django.db.models import Q
from django.utils import timezone
from django.utils.module_loading import import_string

from scheduler_engine.policy import ClassPolicy, PolicyError, PolicySnapshot, TenantClassPolicy, snapshot_from_dict
from tenants import operators, selectors, services
from tenants.audit import change_by
from tenants.models import PolicyProposal, PolicyVersion, Tenant
from tenants.models.words import one_direction
from tenants.policy_changes import Change, Conflict, Document, carried_over, conflicts, diff, granted, in_words, places

_log = logging.getLogger(__name__)

WAITING = PolicyProposal.State.WAITING
OPEN = (PolicyProposal.State.DRAFT, WAITING)  # may still come into force
NOT_MADE = (PolicyProposal.State.CONFLICT, PolicyProposal.State.REFUSED)  # ended by themselves; changed nothing
_PLATFORM = "the platform"  # the actor where nobody's deed is meant; no user can be called so
_BECAME = {
    PolicyProposal.State.DRAFT: "has not been sent off yet",
    PolicyProposal.State.WAITING: "has been sent off already",
    PolicyProposal.State.APPLIED: "has come into force already: {outcome}",
    PolicyProposal.State.WITHDRAWN: "has been withdrawn already, {outcome}",
    PolicyProposal.State.CONFLICT: "cannot come into force any more: {outcome}",
    PolicyProposal.State.REFUSED: "was refused at its moment: {outcome}",
}
MOST_OTHERS = 20  # open edits that a page is compared with: each is a whole policy


def propose(
    *, actor: str, document: Document, based_on: int, reason: str, effective_from: datetime | None = None
) -> PolicyProposal:
    """``draft`` and ``send_off`` in one."""
    drafted = draft(actor=actor, document=document, based_on=based_on)
    return send_off(actor=actor, proposal_id=drafted.id, reason=reason, effective_from=effective_from)


def draft(
    *, actor: str, document: Document, based_on: int, reason: str = "", prices: Sequence[Change] = ()
) -> PolicyProposal:
    """Keeps an edit to be looked at; a ``reason`` is what its form begins with. Raises ValidationError where it
    does not fit the version it began with or changes nothing.
    """
    start = _start(based_on)
    _changed_rows(start, document)
    if not diff(start, document) and not prices:
        raise ValidationError("this edit changes nothing")
    proposal = PolicyProposal(document=document, based_on=based_on, created_by=actor, reason=reason)
    proposal.prices = [asdict(change) for change in prices]
    proposal.state = PolicyProposal.State.DRAFT
    with change_by(actor):
        proposal.save(force_insert=True)
    return proposal


def draft_back(*, actor: str, to_version: int, based_on: int) -> PolicyProposal:
    """A draft that makes the policy equal to an older version for tenants of then. Raises as ``draft``."""
    seen, goal = _start(based_on), _start(to_version)
    edit = back_to(goal, seen)
    reason = f"back to version {to_version}"
    return draft(actor=actor, document=carried_over(edit, seen), based_on=based_on, reason=reason)


def back_to(goal: Document, seen: Document) -> list[Change]:
    """What going back to an older policy changes: nothing of tenants that came later, and no pause. What was paused
    then is not granted by it: it let nobody in.
    """
    known = places(goal)
    edit = [change for change in diff(seen, goal) if change.place in known and change.field != "paused"]
    return [change for change in edit if not (change.field == "allowed" and known[change.place]["paused"])]


def send_off(*, actor: str, proposal_id: UUID, reason: str, effective_from: datetime | None = None) -> PolicyProposal:
    """A draft of one's own is meant. One that nobody must approve and that is due is applied at once.

    Raises ValidationError without a reason, for another's draft, for one that was sent off before, and where it is due
    and does not fit what is in force: then it is a draft still.
    """
    if not reason.strip():
        raise ValidationError("Why: an edit goes on record with its reason.")
    one_direction(reason)
    with _opened(actor, proposal_id, reason) as proposal:
        if proposal.state != PolicyProposal.State.DRAFT:
            raise _became(proposal)
        if proposal.created_by != actor:
            raise ValidationError(f"this draft is {proposal.created_by}'s")
        proposal.state, proposal.reason, proposal.effective_from = WAITING, reason, effective_from
        proposal.needs_approval = settings.RUBATO_POLICY_NEEDS_APPROVAL
        proposal.save(update_fields=["state", "reason", "effective_from", "needs_approval"])
        if not proposal.needs_approval:
            _apply_if_due(proposal)
    return proposal


def release(*, actor: str, proposal_id: UUID) -> PolicyProposal:
    """Puts in force, when it is due, what was sent off for an approval that nobody asks for any more. Whoever does so
    with another's edit has approved it.

    Raises ValidationError where one is asked for, for what waits for none, and where it is due and does not fit.
    """
    with _opened(actor, proposal_id) as proposal:
        if proposal.state != WAITING:
            raise _became(proposal)
        if settings.RUBATO_POLICY_NEEDS_APPROVAL or not lacks_approval(proposal):
            raise ValidationError("this edit waits for a second person, or for its moment")
        proposal.needs_approval = False
        proposal.approved_by = "" if actor == proposal.created_by else actor
        proposal.save(update_fields=["needs_approval", "approved_by"])
        _apply_if_due(proposal)
    return proposal


def lacks_approval(proposal: PolicyProposal) -> bool:
    """It was sent off for an approval and has none."""
    return proposal.state == WAITING and proposal.needs_approval and not proposal.approved_by


def approve(*, actor: str, proposal_id: UUID) -> PolicyProposal:
    """A second person agrees; what is due is applied at once.

    Raises ValidationError for the one who proposed it, for what waits for no approval, and where it is due and does not
    fit what is in force: then it is approved by nobody.
    """
    with _opened(actor, proposal_id) as proposal:
        if proposal.state != WAITING:
            raise _became(proposal)
        if proposal.created_by == actor:
            raise ValidationError("who proposed an edit cannot approve it")
        if not lacks_approval(proposal):
            by = proposal.approved_by
            said = f"{by} has approved this edit already" if by else "this edit needs no approval"
            raise ValidationError(f"{said}: it waits for its moment")
        proposal.approved_by = actor
        proposal.save(update_fields=["approved_by"])
        _apply_if_due(proposal)
    return proposal


def withdraw(*, actor: str, proposal_id: UUID) -> PolicyProposal:
    """It never comes into force; one that ended by itself is out of sight then. Raises ValidationError for one that
    has come into force or was withdrawn before.
    """
    with _opened(actor, proposal_id) as proposal:
        if proposal.state in (PolicyProposal.State.APPLIED, PolicyProposal.State.WITHDRAWN):
            raise _became(proposal)
        _end(proposal, PolicyProposal.State.WITHDRAWN, f"by {actor}")
    return proposal


def apply_due(now: datetime) -> list[PolicyProposal]:
    """All edits whose moment has come and that nobody must still approve, oldest first; each comes to an end of its
    own, whatever becomes of the others.
    """
    ready = PolicyProposal.objects.filter(Q(needs_approval=False) | ~Q(approved_by=""), state=WAITING)
    due = ready.filter(effective_from__lte=now).order_by("effective_from", "created_at")
    return [_apply_or_end(*one) for one in due.values_list("created_by", "id")]


def of_prices(proposal: PolicyProposal) -> list[Change]:
    """What it makes of prices."""
    return [Change(**change) for change in proposal.prices]


def what_it_does(proposal: PolicyProposal) -> tuple[list[Change], list[Conflict]]:
    """Its changes of the policy, and those of policy and prices that cannot be made: what is in force has moved the
    same field.
    """
    edit, refused = _of_policy(proposal)
    prices = of_prices(proposal)
    moved = [
        Conflict(change.place, change.field, theirs, change.after)
        for change, theirs in _in_force(prices)
        if theirs not in (change.before, change.after)
    ]
    return edit, [*refused, *moved]


def misfit(proposal: PolicyProposal) -> str:
    """Why the policy in force cannot be edited so; "" where it can, as far as its own fields are where it began."""
    current = _current().policy
    try:
        _changed_rows(current, carried_over(what_it_does(proposal)[0], current))
    except ValidationError as refusal:
        return " ".join(refusal.messages)
    return ""


def unanswered(proposal: PolicyProposal) -> str:
    """Why nobody answers for it any more; "" where somebody does. Who approved it does, or else who made it: they are
    an operator and hold the rights that it asks for.
    """
    who, deed = (proposal.approved_by, "approved") if proposal.approved_by else (proposal.created_by, "made")
    lack = operators.lack(who, operators.needed_for(what_it_does(proposal)[0], of_prices(proposal)))
    return lack and f"{who}, who {deed} it, {lack}"


def of_the_same_fields(proposal: PolicyProposal) -> list[tuple[PolicyProposal, Change]]:
    """What other open edits, the newest MOST_OTHERS, make of fields that this one changes too, newest edit first."""
    starts: dict[int, Document] = {}

    def changes_of(one: PolicyProposal) -> list[Change]:
        if one.based_on not in starts:
            starts[one.based_on] = _start(one.based_on)
        return [*diff(starts[one.based_on], one.document), *of_prices(one)]

    own = {(change.place, change.field) for change in changes_of(proposal)}
    others = PolicyProposal.objects.filter(state__in=OPEN).exclude(id=proposal.id)[:MOST_OTHERS]
    return [(other, change) for other in others for change in changes_of(other) if (change.place, change.field) in own]


def _in_force(prices: Sequence[Change]) -> list[tuple[Change, int | None]]:
    """Each with what is in force at its place."""
    now = import_string(settings.RUBATO_PRICES)() if prices else {}
    return [(change, now.get(change.place, {}).get(change.field)) for change in prices]


def _to_be_set(prices: Sequence[Change]) -> list[Change]:
    """Without those that stand already."""
    return [change for change, theirs in _in_force(prices) if theirs != change.after]


def _of_policy(proposal: PolicyProposal) -> tuple[list[Change], list[Conflict]]:
    current = _current()
    if proposal.based_on == current.version:
        return diff(current.policy, proposal.document), []
    start = _start(proposal.based_on)
    edit = diff(start, proposal.document)
    return edit, conflicts(edit, diff(start, current.policy))


@contextmanager
def _opened(actor: str, proposal_id: UUID, reason: str = "") -> Iterator[PolicyProposal]:
    """An edit for one act on it: one transaction, under the policy lock and then under its own."""
    with change_by(actor, reason):
        services.serialise_policy_edits()
        yield PolicyProposal.objects.select_for_update().get(id=proposal_id)


def _became(proposal: PolicyProposal) -> ValidationError:
    """What has become of it meanwhile."""
    words = _BECAME[PolicyProposal.State(proposal.state)].format(outcome=proposal.outcome)
    return ValidationError(f"this edit {words}")


def _end(proposal: PolicyProposal, state: PolicyProposal.State, outcome: str) -> None:
    proposal.state, proposal.outcome = state, outcome
    proposal.save(update_fields=["state", "outcome"])


def _apply_or_end(actor: str, proposal_id: UUID) -> PolicyProposal:
    """One that nobody answers for is refused; one that cannot be made, by a fault of ours too, ends as a conflict.
    Raises only where the database is away.
    """
    with _opened(actor, proposal_id) as proposal:
        if proposal.state != WAITING:
            return proposal
        try:
            if lack := unanswered(proposal):
                with change_by(_PLATFORM, lack):
                    _end(proposal, PolicyProposal.State.REFUSED, f"nobody answers for it any more: {lack}")
            else:
                _apply(proposal)
        except ValidationError as refusal:
            said = f"it does not fit what is in force: {' '.join(refusal.messages)}"
            _end(proposal, PolicyProposal.State.CONFLICT, said)
        except (OperationalError, InterfaceError):
            raise
        except Exception as fault:
            _log.exception("the edit %s could not be put in force", proposal_id)
            said = f"a fault of the platform kept it from being made ({type(fault).__name__}); its log says more"
            _end(proposal, PolicyProposal.State.CONFLICT, said)
    return proposal


def _apply_if_due(proposal: PolicyProposal) -> None:
    if proposal.effective_from is None or proposal.effective_from <= timezone.now():
        _apply(proposal)


def _apply(proposal: PolicyProposal) -> None:
    """In one transaction with its outcome; call with the edit opened. Raises ValidationError where it does not fit."""
    actor = proposal.created_by
    with change_by(actor, proposal.reason):
        edit, refused = what_it_does(proposal)
        if refused:
            names = {str(tenant_id): name for tenant_id, name in Tenant.objects.values_list("id", "name")}
            fields = ", ".join(sorted({f"{in_words(one.place, names)}: {one.field}" for one in refused}))
            _end(proposal, PolicyProposal.State.CONFLICT, f"edited by somebody else since: {fields}")
            return
        saved = _write(actor, edit, proposal.reason, _to_be_set(of_prices(proposal)))
        said = f"version {saved.version}" if saved else f"it stands already in version {_current().version}"
        _end(proposal, PolicyProposal.State.APPLIED, said)


def _write(actor: str, edit: Sequence[Change], reason: str, prices: Sequence[Change]) -> PolicyVersion | None:
    """Class rows and cells as the edit makes them, and prices, in one version; None where everything stands so already.
    Call under the policy lock.
    """
    current = _current().policy
    document = carried_over(edit, current)
    if not diff(current, document) and not prices:
        return None
    classes, cells = _changed_rows(current, document)
    services.write_rows(classes=classes, cells=cells)
    if prices:
        import_string(settings.RUBATO_PRICE_WRITER)(actor=actor, changes=prices)
    return services.record_policy(actor, reason, prices)


def _changed_rows(before: Document, after: Document) -> tuple[list[ClassPolicy], list[TenantClassPolicy]]:
    """Classes and cells of the second that the first does not have so. Raises ValidationError where the engine, or a
    row of these by itself, cannot be so.
    """
    then, now = _read(after), _read(before)
    classes = [row for row in then.classes if row not in now.classes]
    cells = [cell for cell in then.tenants if cell not in now.tenants]
    services.check_rows(classes=classes, cells=cells)
    return classes, cells


def _read(document: Document) -> PolicySnapshot:
    try:
        return snapshot_from_dict(granted(document))
    except PolicyError as refusal:
        raise ValidationError(str(refusal)) from refusal


def _start(version: int) -> Document:
    found = selectors.policy_at(version)
    if found is None:
        raise ValidationError(f"there is no policy version {version}")
    return found.policy


def _current() -> selectors.StoredPolicy:
    found = selectors.current_policy()
    if found is None:
        raise ValidationError("no policy has been saved yet")
    return found
