"""Edits of policy and prices that wait for their moment or for a second person; going back to an older version of the
policy is one of them.

An edit is carried over to whatever policy is in force when it is due; where somebody has edited the same field
since, it ends as a conflict and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.utils import timezone
from django.utils.module_loading import import_string

from scheduler_engine.policy import PolicyError, PolicySnapshot, snapshot_from_dict
from tenants import selectors, services
from tenants.audit import change_by
from tenants.models import PolicyProposal, PolicyVersion, Tenant
from tenants.policy_changes import Change, Conflict, Document, carried_over, conflicts, diff, in_words, places

WAITING = PolicyProposal.State.WAITING
OPEN = (PolicyProposal.State.DRAFT, WAITING)  # may still come into force
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
    """Keeps an edit to be looked at; a ``reason`` is what its form begins with. Raises ValidationError where the engine
    would refuse it or it changes nothing.
    """
    start = _start(based_on)
    _read(document)
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
    """What going back to an older policy changes: nothing of tenants that came later."""
    known = places(goal)
    return [change for change in diff(seen, goal) if change.place in known]


def send_off(*, actor: str, proposal_id: UUID, reason: str, effective_from: datetime | None = None) -> PolicyProposal:
    """A draft of one's own is meant. One that nobody must approve and that is due is applied at once.

    Raises ValidationError without a reason, for another's draft and for one that was sent off before.
    """
    if not reason.strip():
        raise ValidationError("Why: an edit goes on record with its reason.")
    with change_by(actor, reason):
        proposal = PolicyProposal.objects.select_for_update().get(id=proposal_id)
        if proposal.state != PolicyProposal.State.DRAFT:
            raise ValidationError(f"this edit is {proposal.state} already")
        if proposal.created_by != actor:
            raise ValidationError(f"this draft is {proposal.created_by}'s")
        proposal.state, proposal.reason, proposal.effective_from = WAITING, reason, effective_from
        proposal.needs_approval = settings.RUBATO_POLICY_NEEDS_APPROVAL
        proposal.save(update_fields=["state", "reason", "effective_from", "needs_approval"])
    if not proposal.needs_approval:
        _apply_if_due(proposal)
    return proposal


def release(*, actor: str, proposal_id: UUID) -> PolicyProposal:
    """Puts in force, when it is due, what was sent off for an approval that nobody asks for any more.

    Raises ValidationError where one is asked for, and for what waits for none.
    """
    with change_by(actor):
        proposal = PolicyProposal.objects.select_for_update().get(id=proposal_id)
        if proposal.state != WAITING:
            raise ValidationError(f"this edit is {proposal.state} already")
        if settings.RUBATO_POLICY_NEEDS_APPROVAL or not lacks_approval(proposal):
            raise ValidationError("this edit waits for a second person, or for its moment")
        proposal.needs_approval = False
        proposal.save(update_fields=["needs_approval"])
    _apply_if_due(proposal)
    return proposal


def lacks_approval(proposal: PolicyProposal) -> bool:
    """It was sent off for an approval and has none."""
    return proposal.state == WAITING and proposal.needs_approval and not proposal.approved_by


def approve(*, actor: str, proposal_id: UUID) -> PolicyProposal:
    """A second person agrees; what is due is applied at once. Raises ValidationError for the one who proposed it."""
    with change_by(actor):
        proposal = PolicyProposal.objects.select_for_update().get(id=proposal_id)
        if proposal.state != WAITING:
            raise ValidationError(f"this edit is {proposal.state} already")
        if proposal.created_by == actor:
            raise ValidationError("who proposed an edit cannot approve it")
        proposal.approved_by = actor
        proposal.save(update_fields=["approved_by"])
    _apply_if_due(proposal)
    return proposal


def withdraw(*, actor: str, proposal_id: UUID) -> bool:
    """False where it had been applied or withdrawn before. One that ended as a conflict is out of sight then."""
    not_in_force = [WAITING, PolicyProposal.State.DRAFT, PolicyProposal.State.CONFLICT]
    with change_by(actor):
        found = PolicyProposal.objects.filter(id=proposal_id, state__in=not_in_force)
        return bool(found.update(state=PolicyProposal.State.WITHDRAWN, outcome=f"by {actor}"))


def apply_due(now: datetime) -> list[PolicyProposal]:
    """All edits whose moment has come and that nobody must still approve, oldest first."""
    ready = PolicyProposal.objects.filter(Q(needs_approval=False) | ~Q(approved_by=""), state=WAITING)
    due = list(
        ready.filter(Q(effective_from=None) | Q(effective_from__lte=now)).order_by("effective_from", "created_at")
    )
    for proposal in due:
        _apply(proposal)
    return due


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


def _apply_if_due(proposal: PolicyProposal) -> None:
    if proposal.effective_from is None or proposal.effective_from <= timezone.now():
        _apply(proposal)


def _apply(proposal: PolicyProposal) -> None:
    """Once, in one transaction with its outcome."""
    actor = proposal.created_by
    with change_by(actor, proposal.reason):
        services.serialise_policy_edits()
        locked = PolicyProposal.objects.select_for_update().get(id=proposal.id)
        if locked.state != WAITING:
            return
        edit, refused = what_it_does(locked)
        if refused:
            names = {str(tenant_id): name for tenant_id, name in Tenant.objects.values_list("id", "name")}
            fields = ", ".join(sorted({f"{in_words(one.place, names)}: {one.field}" for one in refused}))
            locked.state, locked.outcome = PolicyProposal.State.CONFLICT, f"edited by somebody else since: {fields}"
        else:
            saved = _write(actor, edit, locked.reason, _to_be_set(of_prices(locked)))
            said = f"version {saved.version}" if saved else f"it stands already in version {_current().version}"
            locked.state, locked.outcome = PolicyProposal.State.APPLIED, said
        locked.save(update_fields=["state", "outcome"])
    proposal.state, proposal.outcome = locked.state, locked.outcome


def _write(actor: str, edit: Sequence[Change], reason: str, prices: Sequence[Change]) -> PolicyVersion | None:
    """Class rows and cells as the edit makes them, and prices, in one version; None where everything stands so already.
    Call under the policy lock.
    """
    current = _current().policy
    document = carried_over(edit, current)
    if not diff(current, document) and not prices:
        return None
    snapshot, now = _read(document), _read(current)
    classes = [row for row in snapshot.classes if row not in now.classes]
    cells = [cell for cell in snapshot.tenants if cell not in now.tenants]
    services.write_rows(classes=classes, cells=cells)
    if prices:
        import_string(settings.RUBATO_PRICE_WRITER)(actor=actor, changes=prices)
    return services.record_policy(actor, reason, prices)


def _read(document: Document) -> PolicySnapshot:
    try:
        return snapshot_from_dict(document)
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
