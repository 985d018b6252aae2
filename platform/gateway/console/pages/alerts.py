"""Alerts of a tenant: the lines it has drawn, how near its use is to each, and what was crossed and told to whom."""

from __future__ import annotations

import uuid
from collections import Counter

from django import forms
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST

from gateway.console.pages.membership import Member, page
from gateway.gate import Gate
from gateway.webhooks import alerts as crossed
from gateway.webhooks import services
from gateway.webhooks.models import Alert, Delivery, Threshold
from tenants.forms import WholeNumber
from tenants.models import CLASS_CHOICES
from tenants.roles import Capability
from wire.bus import BusError
from wire.redis_keys import Keys

SHOWN = 50


class NewThreshold(forms.Form):
    priority_class = forms.ChoiceField(choices=CLASS_CHOICES, label="class")
    measure = forms.ChoiceField(choices=Threshold.Measure.choices, label="counted in")
    amount = WholeNumber(
        min_value=1,
        max_value=10**15,
        help_text="1 to 100 for percent; else a number of tokens in the class's window, of those that are charged",
    )


@page(Capability.MANAGE_WEBHOOKS)
def alerts(request: HttpRequest, me: Member) -> HttpResponse:
    """The lines, the form, and the newest alerts with what became of them."""
    form = NewThreshold(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            services.draw(actor=me.actor, tenant=me.tenant, **form.cleaned_data)
        except ValidationError as refusal:
            form.add_error(None, refusal)
        else:
            messages.success(request, "You will see it here, and your webhooks for quota.threshold are told.")
            return redirect("console-alerts", slug=me.tenant.slug)
    found = list(Alert.objects.all()[:SHOWN])
    told = _told(found)
    standings = _standings()
    context = {
        "me": me,
        "standings": standings,
        "noted": _noted(standings or []),
        "alerts": [(one, told.get((one.event, one.subject), "")) for one in found],
        "form": form,
    }
    return render(request, "console/alerts.html", context)


def _standings() -> list[crossed.Standing] | None:
    """None while the gate does not answer."""
    lines = list(Threshold.objects.all())
    if not lines:
        return []
    try:
        with Gate(settings.REDIS_URL, Keys(settings.RUBATO_REDIS_PREFIX)) as gate:
            return crossed.standings(timezone.now(), lines, gate)
    except BusError:
        return None


def _noted(standings: list[crossed.Standing]) -> set[str]:
    """Those crossed lines of which an alert is kept. Beat looks for them every few seconds, the page at once."""
    subjects = [one.subject for one in standings if one.is_crossed]
    if not subjects:
        return set()
    return set(Alert.objects.filter(event="quota.threshold", subject__in=subjects).values_list("subject", flat=True))


def _told(found: list[Alert]) -> dict[tuple[str, str], str]:
    """How many endpoints have heard of each, are being told, and were given up on."""
    told: dict[tuple[str, str], Counter[str]] = {}
    rows = Delivery.objects.filter(subject__in={one.subject for one in found}).values_list("event", "subject", "state")
    for event, subject, state in rows:
        told.setdefault((event, subject), Counter())[Delivery.State(state).label] += 1
    return {about: ", ".join(f"{count} {state}" for state, count in counts.items()) for about, counts in told.items()}


@require_POST
@page(Capability.MANAGE_WEBHOOKS)
def remove(request: HttpRequest, me: Member, threshold_id: uuid.UUID) -> HttpResponse:
    if services.wipe(actor=me.actor, threshold_id=threshold_id):
        messages.success(request, "It is gone.")
    else:
        messages.error(request, "There is no such line.")
    return redirect("console-alerts", slug=me.tenant.slug)
