"""Moments in pages: written in UTC, and told in the viewer's own zone by ``times.js``. Built into all templates."""

from __future__ import annotations

from datetime import datetime

from django import template
from django.utils.html import format_html
from django.utils.timezone import localtime

register = template.Library()


@register.filter
def moment(at: datetime | None, to: str = "minute") -> str:
    """``to``: "minute", "second" or "day". Nothing for nothing."""
    if at is None:
        return ""
    shape = {"minute": "%Y-%m-%d %H:%M UTC", "second": "%Y-%m-%d %H:%M:%S UTC", "day": "%Y-%m-%d"}[to]
    text = localtime(at).strftime(shape)
    return format_html('<time datetime="{}" data-to="{}">{}</time>', at.isoformat(timespec="seconds"), to, text)
