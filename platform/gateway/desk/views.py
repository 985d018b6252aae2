"""The desk's tables: quotas, classes, the history and its versions. forms.py reads them, proposals.py writes them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST

from gateway.desk import forms, price_table
from gateway.desk.named import named, names_of_tenants, policy_in_force
from gateway.desk.rights import operator, reason_of
from gateway.desk.telling import telling
from tenants import proposals, selectors, services
from tenants.models import PolicyProposal, PolicyVersion, PriorityClass, QuotaPolicy, Tenant
from tenants.operators import MAY_EDIT_POLICY, MAY_EDIT_PRICES
from tenants.policy_changes import Change, diff, in_words, places

TENANTS_A_PAGE = 20
VERSIONS_A_PAGE = 50
_PAST = {True: "paused", False: "resumed"}
_TONES = {messages.SUCCESS: "good", messages.ERROR: "bad"}


@operator(MAY_EDIT_POLICY)
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
    current = policy_in_force()
    paused = QuotaPolicy.objects.filter(is_paused=True)
    off = {str(tenant_id) for tenant_id in Tenant.objects.filter(is_active=False).values_list("id", flat=True)}
    shut = {(str(row.tenant_id), row.priority_class) for row in paused}
    table = forms.cells(current.policy, names, names, shut, off)
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


@operator(MAY_EDIT_POLICY)
def classes(request: HttpRequest) -> HttpResponse:
    """The parameters of the three classes; a POST makes a draft."""
    current = policy_in_force()
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


@operator(MAY_EDIT_POLICY, MAY_EDIT_PRICES)
def history(request: HttpRequest) -> HttpResponse:
    """Versions and waiting edits, newest first; with ``?all=`` also versions that only brought a new tenant.
    ``?before=`` a version goes on where a page ended.
    """
    states = (*proposals.OPEN, *proposals.NOT_MADE)
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
        "waiting": PolicyProposal.objects.defer("document").filter(state__in=states)[:VERSIONS_A_PAGE],
        "current": newest.version if newest else 0,
    }
    return render(request, "operator/policy/history.html", context)


@operator(MAY_EDIT_POLICY, MAY_EDIT_PRICES)
def version(request: HttpRequest, number: int) -> HttpResponse:
    """What one version changed against the one before, and what going back to it would change. POST drafts that, for
    those who may change quotas.
    """
    then = selectors.policy_at(number)
    if then is None:
        raise Http404("There is no such version.")
    current = policy_in_force()
    if request.method == "POST":
        if not request.user.has_perm(MAY_EDIT_POLICY):
            raise PermissionDenied
        return _back(request, number)
    names = names_of_tenants()
    before = selectors.policy_at(number - 1)
    row = get_object_or_404(PolicyVersion.objects.defer("document"), version=number)
    context = {
        "version": row,
        "price_changes": price_table.told([Change(**one) for one in row.prices]),
        "changes": [named(one, names) for one in diff(before.policy, then.policy)] if before else [],
        "back": [named(one, names) for one in proposals.back_to(then.policy, current.policy)],
        "stay_paused": [
            (in_words(place, names), who)
            for place, who in selectors.paused_by().items()
            if places(then.policy).get(place, {}).get("allowed")
        ],
        "current": current.version,
    }
    return render(request, "operator/policy/version.html", context)


@operator(MAY_EDIT_POLICY)
@require_POST
def pause(request: HttpRequest, tenant_id: uuid.UUID, label: str) -> HttpResponse:
    """Emergency: the cell lets nobody in any more, within a second, without approval; or, where it was paused, does so
    again. What was never granted is granted by an edit alone, which is seen first. Asked by htmx, it answers with the
    button as it is then, and leaves the rest of the page alone.
    """
    row = get_object_or_404(QuotaPolicy, tenant_id=tenant_id, priority_class=label)
    is_paused, actor = request.POST.get("action") != "resume", request.user.get_username()
    try:
        saved = services.switch_class(
            actor=actor, tenant_id=tenant_id, label=label, is_paused=is_paused, reason=reason_of(request)
        )
    except ValidationError as refusal:
        now, level, said = telling(), messages.ERROR, " ".join(refusal.messages)
    else:
        now, level, said = telling(), messages.SUCCESS, f"{row.tenant.name}, {label}: {_PAST[is_paused]}."
        if not now.is_told:  # what the page says above of its version changes by itself, and this does not
            level, said = messages.WARNING, f"{said} Saved as version {saved.version}."
    if "HX-Request" not in request.headers:
        messages.add_message(request, level, said)
        return redirect("desk")
    row.refresh_from_db()
    button = {"tenant_id": tenant_id, "tenant": row.tenant.name, "label": label, "is_paused": row.is_paused}
    context = {**button, "tone": _TONES.get(level, ""), "said": said, "telling": now}
    return render(request, "operator/policy/paused.html", context)


@operator(MAY_EDIT_POLICY, MAY_EDIT_PRICES)
def told(request: HttpRequest) -> HttpResponse:
    """A fragment that asks again until the newest version has been told; or, with ``?version=``, that version's badge.

    Without HX-Request, as after a log-in, the history.
    """
    if "HX-Request" not in request.headers:
        return redirect("desk-history")
    context: dict[str, Any] = {"telling": telling(), "is_news": True}
    if number := _number(request.GET.get("version", "")):
        return render(request, "operator/policy/badge.html", context | {"number": number})
    return render(request, "operator/policy/telling.html", context)


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
        cell, _, _ = box.name.rpartition(".")
        if box.name in posted or (box.kind == "tick" and f"{cell}.weight" in posted):
            box.value = posted.get(box.name, "")  # an unticked box is not sent
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


def _based_on(request: HttpRequest, otherwise: int) -> int:
    return _number(request.POST.get("version", ""), otherwise)


def _number(text: str, otherwise: int = 0) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else otherwise


def _page_number(request: HttpRequest) -> int:
    text = request.GET.get("page", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0


def _help(name: str) -> str:
    return str(getattr(PriorityClass._meta.get_field(name), "help_text", ""))
