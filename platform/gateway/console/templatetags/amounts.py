"""Numbers in pages: whole ones grouped by thousands, money in whole units. Built into all templates."""

from __future__ import annotations

from django import template
from django.conf import settings

from billing import documents

register = template.Library()


@register.filter
def grouped(number: object) -> object:
    """1234567 as 1,234,567; anything else as it is."""
    return f"{number:,}" if isinstance(number, int) else number


@register.simple_tag
def currency() -> str:
    """What a whole unit is called: EUR."""
    return str(settings.RUBATO_CURRENCY).upper()


@register.filter
def money(micros: int) -> str:
    """Micro-units as whole units: 1234567 as 1.234567."""
    return documents.money(micros)
