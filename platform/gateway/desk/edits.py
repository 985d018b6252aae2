"""The page of one edit: what it changes and collides with, what it would have done, and what can be done with it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import BadRequest, PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from gateway.desk.door_preview import in_force, refused, without_effect
from gateway.desk.last_hour import calls_before
from gateway.desk.named import Named, named, names_of_tenants, policy_in_force
from gateway.desk.preview import Previews
from gateway.desk.price_table import price_preview, told
from gateway.desk.replaying import FEW_MINUTES, HOUR
from gateway.desk.rights import operator, reason_of
from gateway.desk.telling import telling
from tenants import proposals, selectors
from tenants.models import PolicyProposal
from tenants.operators import MAY_EDIT_POLICY, MAY_EDIT_PRICES, needed_for
from tenants.policy_changes import Change, Document, carried_over, followed, in_words, places

_OPEN = proposals.OPEN
_UNDONE = (*_OPEN, *proposals.NOT_MADE)  # still to be made, by this edit or by another in its place


@operator(MAY_EDIT_POLICY, MAY_EDIT_PRICES)
def proposal(request: HttpRequest, proposal_id: uuid.UUID) -> HttpResponse:
    """One edit: what it changes, what it collides with, what it would have done, and what can be done with it.

    POST does it; what is refused leaves the page as the edit is then, with what was typed.
    """
    found = get_object_or_404(PolicyProposal, id=proposal_id)
    if request.method == "POST":
        if not request.user.has_perms(_rights(found)):
            raise PermissionDenied
        if answer := _act(request, found):
            return answer
        found.refresh_from_db()
    return _page(request, found)


def _page(request: HttpRequest, found: PolicyProposal) -> HttpResponse:
    edit, refusals = proposals.what_it_does(found)
    prices = proposals.of_prices(found)
    rights = needed_for(edit, prices)
    is_open = found.state in _OPEN
    policy = carried_over(edit, policy_in_force().policy)
    names = names_of_tenants()
    context = {
        "proposal": found,
        "changes": [named(change, names) for change in edit],
        "conflicts": [named(one, names) for one in refusals] if found.state in _UNDONE else [],
        "misfit": proposals.misfit(found) if is_open and not refusals else "",
        "unanswered": _unanswered(found),
        "others": _others(found, names) if found.state in _UNDONE else [],
        "price_changes": told(prices),
        "prices": price_preview(prices) if is_open else None,
        "door": _door(followed(policy), edit, names) if is_open else None,
        "idle_overflows": [in_words(place, names) for place in without_effect(places(policy), edit)] if is_open else [],
        "paused": _paused(edit, names) if is_open else [],
        "preview": Previews().find(str(found.id)),
        "is_open": is_open,
        "names": names,
        "may_act": request.user.has_perms(rights),
        "subject": " and ".join(rights.values()),
        "is_mine": found.created_by == request.user.get_username(),
        "lacks_approval": proposals.lacks_approval(found),
        "is_approval_asked": settings.RUBATO_POLICY_NEEDS_APPROVAL,
        "typed": {"reason": request.POST.get("reason", found.reason), "from": request.POST.get("effective_from", "")},
    }
    return render(request, "operator/policy/proposal.html", context)


def _rights(found: PolicyProposal) -> dict[str, str]:
    return needed_for(proposals.what_it_does(found)[0], proposals.of_prices(found))


@operator(MAY_EDIT_POLICY)
def preview(request: HttpRequest, proposal_id: uuid.UUID) -> HttpResponse:
    """GET: how far the replay is (a fragment that asks again while it runs). POST: start it, of an edit that may still
    come into force, made to the policy as it is now; or stop it.

    Without HX-Request, as after a log-in, the whole page.
    """
    found = get_object_or_404(PolicyProposal.objects.defer("document"), id=proposal_id)
    previews, is_open = Previews(), found.state in _OPEN
    if request.method == "POST":
        action = request.POST.get("action")
        if action == "stop":
            previews.stop(str(found.id))
        elif is_open:
            policy = carried_over(proposals.what_it_does(found)[0], policy_in_force().policy)
            previews.start(str(found.id), followed(policy), FEW_MINUTES if action == "few" else HOUR)
    if "HX-Request" not in request.headers:
        return redirect("desk-proposal", proposal_id=found.id)
    names = names_of_tenants()
    context = {"proposal": found, "preview": previews.find(str(found.id)), "is_open": is_open, "names": names}
    return render(request, "operator/policy/preview.html", context)


def _act(request: HttpRequest, found: PolicyProposal) -> HttpResponse | None:
    """Where it leads; None where it is refused, which is said then. Of a button that was pressed twice, both times to
    the same.
    """
    actor, action = request.user.get_username(), request.POST.get("action")
    sent: dict[str, Any] = {}
    try:
        match action:
            case "send":
                sent = {"reason": reason_of(request), "effective_from": _moment(request)}
                found = proposals.send_off(actor=actor, proposal_id=found.id, **sent)
            case "approve":
                found = proposals.approve(actor=actor, proposal_id=found.id)
            case "release":
                found = proposals.release(actor=actor, proposal_id=found.id)
            case "withdraw":
                found = proposals.withdraw(actor=actor, proposal_id=found.id)
            case _:
                raise BadRequest("An edit is sent, approved, released or withdrawn.")
    except ValidationError as refusal:
        found.refresh_from_db()
        if not _stands(found, actor, action, sent):
            messages.error(request, " ".join(refusal.messages))
            return None
    _tell(request, found)
    return redirect("desk-history") if action == "withdraw" else redirect("desk-proposal", proposal_id=found.id)


def _stands(found: PolicyProposal, actor: str, action: str | None, sent: Mapping[str, Any]) -> bool:
    """What is asked for was done already, by the same person and in the same words."""
    if action == "withdraw":
        return (found.state, found.outcome) == (PolicyProposal.State.WITHDRAWN, f"by {actor}")
    if found.state not in (proposals.WAITING, PolicyProposal.State.APPLIED):
        return False
    if action == "send":
        stands = {"reason": found.reason, "effective_from": found.effective_from}
        return (actor, sent) == (found.created_by, stands)
    return found.approved_by == actor


def _tell(request: HttpRequest, found: PolicyProposal) -> None:
    match found.state:
        case PolicyProposal.State.APPLIED:
            messages.success(request, f"{'In force' if telling().is_told else 'Saved'}: {found.outcome}.")
        case PolicyProposal.State.WITHDRAWN:
            messages.success(request, "The edit is withdrawn.")
        case PolicyProposal.State.CONFLICT:
            messages.error(request, f"Not in force: {found.outcome}. Make the edit again on the policy as it is now.")
        case _:
            what = "somebody else's approval" if proposals.lacks_approval(found) else "its moment"
            messages.success(request, f"The edit waits for {what}.")


def _unanswered(found: PolicyProposal) -> str:
    """Of one that comes into force by itself."""
    waits = found.state == proposals.WAITING and not proposals.lacks_approval(found)
    return proposals.unanswered(found) if waits else ""


def _others(found: PolicyProposal, names: Mapping[str, str]) -> list[tuple[PolicyProposal, Named]]:
    return [(other, named(change, names)) for other, change in proposals.of_the_same_fields(found)]


def _paused(edit: list[Change], names: Mapping[str, str]) -> list[tuple[str, str, bool]]:
    """Paused cells that the edit touches: where, who paused it, and whether the edit takes the class away."""
    touched = {one.place for one in edit}
    taken = {one.place for one in edit if one.field == "allowed" and not one.after}
    found = selectors.paused_by().items()
    return [(in_words(place, names), who, place in taken) for place, who in found if place in touched]


def _door(policy: Document, edit: list[Change], names: Mapping[str, str]) -> list[Named] | None:
    """For the cells that the edit touches, as this policy has them, over the calls of the last hour. None where it
    touches no cell.
    """
    touched = {change.place for change in edit if not change.place.startswith("class ")}
    rows = places(policy)
    limits = {place: in_force(place, rows) for place in rows if place in touched}
    if not limits:
        return None
    return [named(one, names) for one in refused(calls_before(timezone.now()), limits)]


def _moment(request: HttpRequest) -> datetime | None:
    """UTC where the form names no zone; None for at once. The minute under way is not past: the form knows no seconds.

    Raises ValidationError.
    """
    text = request.POST.get("effective_from", "").strip()
    if not text:
        return None
    try:
        moment = parse_datetime(text)
        moment = moment and (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        moment = None
    if moment is None:
        raise ValidationError("From: write the moment as 2026-12-01T08:00")
    if moment < timezone.now().replace(second=0, microsecond=0):
        raise ValidationError(f"From: {moment:%Y-%m-%d %H:%M} UTC is past. Name a moment to come, or none for now.")
    return moment
