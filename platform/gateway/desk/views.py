"""The desk's pages, for staff who may change quotas. They translate; forms.py reads, proposals.py writes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.admin.views.decorators import staff_member_required
from django.contrib.auth.decorators import permission_required
from django.core.exceptions import BadRequest, PermissionDenied, ValidationError
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from gateway.desk import forms
from gateway.desk.door_preview import Refused, in_force, refused, without_effect
from gateway.desk.last_hour import calls_before
from gateway.desk.preview import Previews
from gateway.desk.price_table import MAY_EDIT_PRICES, price_preview, told
from gateway.desk.replaying import FEW_MINUTES, HOUR
from tenants import audit, proposals, selectors, services
from tenants.models import PolicyProposal, PolicyVersion, PriorityClass, QuotaPolicy, Tenant
from tenants.policy_changes import Change, Document, carried_over, diff, in_words, places

TENANTS_A_PAGE = 20
VERSIONS_A_PAGE = 50
_OPEN = (PolicyProposal.State.DRAFT, PolicyProposal.State.WAITING)


def operator(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Staff who may change quotas; every change is on record with a request id."""

    def inside(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        with audit.request(f"req_{uuid.uuid4().hex}", _reason(request)):
            return view(request, *args, **kwargs)

    allowed = permission_required("tenants.change_quotapolicy", raise_exception=True)(inside)
    return never_cache(staff_member_required(allowed))


@operator
def matrix(request: HttpRequest) -> HttpResponse:
    """The quota matrix of the tenants that are searched for; a POST makes a draft."""
    found = Tenant.objects.order_by("name", "id")
    wanted = request.GET.get("q", "").strip()
    if wanted:
        found = found.filter(Q(name__icontains=wanted) | Q(slug__icontains=wanted))
    number = _page_number(request)
    shown = list(found[number * TENANTS_A_PAGE : (number + 1) * TENANTS_A_PAGE + 1])
    tenants = shown[:TENANTS_A_PAGE]
    names = {str(tenant.id): tenant.name for tenant in tenants}
    current = _in_force()
    paused = QuotaPolicy.objects.filter(tenant__in=tenants, is_paused=True)
    table = forms.cells(current.policy, names, names, {(str(row.tenant_id), row.priority_class) for row in paused})
    if request.method == "POST" and (answer := _drafted(request, [box for cell in table for box in cell.boxes])):
        return answer
    context = {
        "cells": table,
        "columns": [(name, *forms.COLUMNS[name]) for name in forms.CELL_FIELDS],
        "windows": forms.WINDOWS,
        "version": _based_on(request, current.version),
        "q": wanted,
        "number": number,
        "has_more": len(shown) > TENANTS_A_PAGE,
    }
    return render(request, "operator/policy/matrix.html", context)


@operator
def classes(request: HttpRequest) -> HttpResponse:
    """The parameters of the three classes; a POST makes a draft."""
    current = _in_force()
    rows = forms.class_rows(current.policy)
    if request.method == "POST" and (answer := _drafted(request, [box for _, boxes in rows for box in boxes])):
        return answer
    help_texts = {name: _help(name) for name, _ in rows}
    context = {
        "rows": [(name, help_texts[name], boxes) for name, boxes in rows],
        "labels": list(forms.RANKS),
        "version": _based_on(request, current.version),
    }
    return render(request, "operator/policy/classes.html", context)


@operator
def proposal(request: HttpRequest, proposal_id: uuid.UUID) -> HttpResponse:
    """One edit: what it changes, what it collides with, what it would have done, and what can be done with it."""
    found = get_object_or_404(PolicyProposal, id=proposal_id)
    if request.method == "POST":
        return _act(request, found)
    edit, refusals = proposals.what_it_does(found)
    prices = proposals.of_prices(found)
    is_open = found.state in _OPEN
    policy = carried_over(edit, _in_force().policy)
    names = {str(tenant_id): name for tenant_id, name in Tenant.objects.values_list("id", "name")}
    context = {
        "proposal": found,
        "changes": [_named(change, names) for change in edit],
        "conflicts": [Named(in_words(one.place, names), one) for one in refusals],
        "price_changes": told(prices),
        "prices": price_preview(prices) if is_open else None,
        "door": _door(policy, edit, names) if is_open else None,
        "idle_overflows": [in_words(place, names) for place in without_effect(places(policy), edit)] if is_open else [],
        "preview": Previews().find(str(found.id)),
        "is_open": is_open,
        "names": names,
        "is_mine": found.created_by == request.user.get_username(),
        "lacks_approval": proposals.lacks_approval(found),
        "is_approval_asked": settings.RUBATO_POLICY_NEEDS_APPROVAL,
    }
    return render(request, "operator/policy/proposal.html", context)


@operator
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
            policy = carried_over(proposals.what_it_does(found)[0], _in_force().policy)
            previews.start(str(found.id), policy, FEW_MINUTES if action == "few" else HOUR)
    if "HX-Request" not in request.headers:
        return redirect("desk-proposal", proposal_id=found.id)
    names = {str(tenant_id): name for tenant_id, name in Tenant.objects.values_list("id", "name")}
    context = {"proposal": found, "preview": previews.find(str(found.id)), "is_open": is_open, "names": names}
    return render(request, "operator/policy/preview.html", context)


@operator
def history(request: HttpRequest) -> HttpResponse:
    """Versions and waiting edits, newest first; with ``?all=`` also versions that only brought a new tenant.
    ``?before=`` a version goes on where a page ended.
    """
    open_states = [PolicyProposal.State.WAITING, PolicyProposal.State.DRAFT, PolicyProposal.State.CONFLICT]
    versions = PolicyVersion.objects.defer("document")
    newest = versions.first()
    if not (is_all := "all" in request.GET):
        versions = versions.exclude(reason__startswith=services.NEW_TENANT[0], reason__endswith=services.NEW_TENANT[1])
    if before := _number(request.GET.get("before", "")):
        versions = versions.filter(version__lt=before)
    found = list(versions[: VERSIONS_A_PAGE + 1])
    context = {
        "versions": found[:VERSIONS_A_PAGE],
        "older": found[VERSIONS_A_PAGE - 1].version if len(found) > VERSIONS_A_PAGE else None,
        "is_all": is_all,
        "waiting": PolicyProposal.objects.defer("document").filter(state__in=open_states)[:VERSIONS_A_PAGE],
        "current": newest.version if newest else 0,
    }
    return render(request, "operator/policy/history.html", context)


@operator
def version(request: HttpRequest, number: int) -> HttpResponse:
    """What one version changed against the one before, and what going back to it would change. POST drafts that."""
    then = selectors.policy_at(number)
    if then is None:
        raise Http404("There is no such version.")
    current = _in_force()
    if request.method == "POST":
        return _back(request, number)
    names = {str(tenant_id): name for tenant_id, name in Tenant.objects.values_list("id", "name")}
    before = selectors.policy_at(number - 1)
    row = get_object_or_404(PolicyVersion.objects.defer("document"), version=number)
    context = {
        "version": row,
        "price_changes": told([Change(**one) for one in row.prices]),
        "changes": [_named(one, names) for one in diff(before.policy, then.policy)] if before else [],
        "back": [_named(one, names) for one in proposals.back_to(then.policy, current.policy)],
        "current": current.version,
    }
    return render(request, "operator/policy/version.html", context)


@operator
@require_POST
def pause(request: HttpRequest, tenant_id: uuid.UUID, label: str) -> HttpResponse:
    """Emergency: the cell lets nobody in any more, within a second, without approval; or, where it was paused, does so
    again. What was never granted is granted by an edit alone, which is seen first. Asked by htmx, it answers with the
    button as it is then, and leaves the rest of the page alone.
    """
    row = get_object_or_404(QuotaPolicy, tenant_id=tenant_id, priority_class=label)
    is_paused, actor = request.POST.get("action") != "resume", request.user.get_username()
    try:
        services.switch_class(
            actor=actor, tenant_id=tenant_id, label=label, is_paused=is_paused, reason=_reason(request)
        )
    except ValidationError as refusal:
        is_done, said = False, " ".join(refusal.messages)
    else:
        is_done, said = True, f"{row.tenant.name}, {label}: {'paused' if is_paused else 'resumed'}."
    if "HX-Request" not in request.headers:
        messages.add_message(request, messages.SUCCESS if is_done else messages.ERROR, said)
        return redirect("desk")
    row.refresh_from_db()
    button = {"tenant_id": tenant_id, "tenant": row.tenant.name, "label": label, "is_paused": row.is_paused}
    return render(request, "operator/policy/paused.html", {**button, "is_done": is_done, "said": said})


def _act(request: HttpRequest, found: PolicyProposal) -> HttpResponse:
    actor, action = request.user.get_username(), request.POST.get("action")
    if found.prices and not request.user.has_perm(MAY_EDIT_PRICES):
        raise PermissionDenied
    try:
        if action == "send":
            found = proposals.send_off(
                actor=actor,
                proposal_id=found.id,
                reason=_reason(request),
                effective_from=_moment(request),
            )
        elif action == "approve":
            found = proposals.approve(actor=actor, proposal_id=found.id)
        elif action == "release":
            found = proposals.release(actor=actor, proposal_id=found.id)
        elif action == "withdraw":
            proposals.withdraw(actor=actor, proposal_id=found.id)
            messages.success(request, "The edit is withdrawn.")
            return redirect("desk-history")
        else:
            raise BadRequest("An edit is sent, approved, released or withdrawn.")
    except ValidationError as refusal:
        messages.error(request, " ".join(refusal.messages))
    else:
        _tell(request, found)
    return redirect("desk-proposal", proposal_id=found.id)


def _tell(request: HttpRequest, found: PolicyProposal) -> None:
    match found.state:
        case PolicyProposal.State.APPLIED:
            messages.success(request, f"In force: {found.outcome}.")
        case PolicyProposal.State.CONFLICT:
            messages.error(request, f"Not in force: {found.outcome}. Make the edit again on the policy as it is now.")
        case _:
            what = "somebody else's approval" if proposals.lacks_approval(found) else "its moment"
            messages.success(request, f"The edit waits for {what}.")


def _back(request: HttpRequest, number: int) -> HttpResponse:
    seen = _based_on(request, 0)
    if not seen:
        messages.error(request, "The form did not say which version was in force when you looked: look again.")
        return redirect("desk-version", number=number)
    try:
        drafted = proposals.draft_back(actor=request.user.get_username(), to_version=number, based_on=seen)
    except ValidationError as refusal:
        messages.error(request, " ".join(refusal.messages))
        return redirect("desk-version", number=number)
    return redirect("desk-proposal", proposal_id=drafted.id)


def _drafted(request: HttpRequest, boxes: list[forms.Box]) -> HttpResponse | None:
    """The way to the draft; None where something is wrong, which then stands at its box."""
    posted: Mapping[str, str] = request.POST.dict()
    based_on = _based_on(request, 0)
    start = selectors.policy_at(based_on)
    if start is None:
        messages.error(request, "This form is of no policy version we know; here is the one in force.")
        return None
    made = forms.edited(start.policy, posted)
    for box in boxes:
        if box.name in posted:
            box.value = posted[box.name]
        box.wrong = made.wrong.get(box.name, "")
    if made.wrong:
        what = "One field needs" if len(made.wrong) == 1 else f"{len(made.wrong)} fields need"
        messages.error(request, f"Nothing was saved. {what} another value: what it may be is written below it.")
        return None
    try:
        drafted = proposals.draft(actor=request.user.get_username(), document=made.document, based_on=based_on)
    except ValidationError as refusal:
        messages.error(request, " ".join(refusal.messages))
        return None
    return redirect("desk-proposal", proposal_id=drafted.id)


def _door(policy: Document, edit: list[Change], names: Mapping[str, str]) -> list[Named] | None:
    """For the cells that the edit touches, as this policy has them, over the calls of the last hour. None where it
    touches no cell.
    """
    touched = {change.place for change in edit if not change.place.startswith("class ")}
    rows = places(policy)
    limits = {place: in_force(place, rows) for place in rows if place in touched}
    if not limits:
        return None
    return [_named_refusal(one, names) for one in refused(calls_before(timezone.now()), limits)]


@dataclass(frozen=True, slots=True)
class Named:
    """A change or a refusal with the tenant's name in place of its id."""

    place: str
    what: Any


def _named(change: Change, names: Mapping[str, str]) -> Named:
    return Named(in_words(change.place, names), change)


def _named_refusal(one: Refused, names: Mapping[str, str]) -> Named:
    return Named(in_words(one.place, names), one)


def _in_force() -> selectors.StoredPolicy:
    return selectors.current_policy() or selectors.StoredPolicy(0, selectors.live_policy(0))


def _based_on(request: HttpRequest, otherwise: int) -> int:
    return _number(request.POST.get("version", ""), otherwise)


def _number(text: str, otherwise: int = 0) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else otherwise


def _page_number(request: HttpRequest) -> int:
    text = request.GET.get("page", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0


def _reason(request: HttpRequest) -> str:
    """As much of it as is kept; no text of the database holds a NUL."""
    return request.POST.get("reason", "")[: audit.LONGEST_REASON].replace("\0", "")


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


def _help(name: str) -> str:
    return str(getattr(PriorityClass._meta.get_field(name), "help_text", ""))
