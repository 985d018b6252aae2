"""Changes of prices and alerts: keyword-only, actor given, one transaction, told after commit. Ledger lines are
ledger.py's.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from django.core.exceptions import ValidationError
from django.utils import timezone

from billing import selectors
from billing.lines import PriceKey
from billing.models import LedgerAlert, LedgerEntry, Price, PriceVersion
from billing.pricing import TokenKind, TokenPrices
from tenants import services as tenant_services
from tenants.audit import change_by
from tenants.models import Tenant

_KEY_LENGTH = LedgerEntry._meta.get_field("entry_key").max_length or 0


def set_prices(*, actor: str, prices: Mapping[PriceKey, TokenPrices]) -> PriceVersion:
    """The next price list: the current one with these prices in place of its own. Operations reserved before keep
    theirs.
    """
    places = ", ".join(sorted({f"{model} {priority_class}" for model, priority_class in prices}))
    with change_by(actor):
        # Also takes the lock, and makes everybody read the new list.
        tenant_services.record_policy(actor, f"Prices of {places}.")
        return write_prices(actor=actor, prices=prices)


def write_prices(*, actor: str, prices: Mapping[PriceKey, TokenPrices]) -> PriceVersion:
    """The rows of it; ``record_policy`` stands in the same transaction. Raises ValidationError."""
    current = selectors.price_list(selectors.current_price_version()).prices
    version = PriceVersion(actor=actor)
    version.save(force_insert=True)
    rows = [
        Price(
            price_version=version,
            model=model,
            priority_class=priority_class,
            token_kind=kind.value,
            micros_per_million=getattr(price, kind.value),
        )
        for (model, priority_class), price in sorted({**current, **prices}.items())
        for kind in TokenKind
    ]
    for row in rows:
        row.full_clean(exclude=["price_version"], validate_unique=False, validate_constraints=False)
    Price.objects.bulk_create(rows)
    return version


def adjust(*, actor: str, operation_id: uuid.UUID, amount_micros: int, reason: str) -> LedgerEntry:
    """Repairs an operation's charge by a new line that names it; positive is charged. Raises ValidationError."""
    line = LedgerEntry.objects.filter(operation_id=operation_id).order_by("id").first()
    if line is None:
        raise ValidationError(f"no operation {operation_id} in the ledger")
    if not reason or not amount_micros:
        raise ValidationError("an adjustment has a reason and an amount other than 0")
    entry = LedgerEntry(
        operation_id=operation_id,
        entry_key=f"adjust:{uuid.uuid4()}",
        kind="adjust",
        tenant_id=line.tenant_id,
        project_id=line.project_id,
        key_id=line.key_id,
        priority_class=line.priority_class,
        model=line.model,
        amount_micros=amount_micros,
        price_version=line.price_version,
        reason=reason,
        actor=actor,
    )
    entry.save(force_insert=True)
    return entry


def credit(*, actor: str, tenant_id: uuid.UUID, amount_micros: int, reason: str, credit_id: str = "") -> LedgerEntry:
    """Gives a tenant an amount, told by its next statement. Raises ValidationError.

    ``credit_id`` is the giver's own number: given again with the same id, the first entry is returned and nothing
    written.
    """
    if amount_micros <= 0 or not reason:
        raise ValidationError("a credit has a reason and an amount above 0")
    if not Tenant.objects.filter(id=tenant_id).exists():
        raise ValidationError(f"no tenant {tenant_id}")
    entry_key = f"credit:{credit_id or uuid.uuid4()}"
    if len(entry_key) > _KEY_LENGTH:
        raise ValidationError(f"credit_id has at most {_KEY_LENGTH - len('credit:')} characters")
    entry, is_new = LedgerEntry.objects.get_or_create(
        operation_id=uuid.uuid5(tenant_id, entry_key),
        entry_key=entry_key,
        defaults={
            "kind": "credit",
            "tenant_id": tenant_id,
            "amount_micros": amount_micros,
            "reason": reason,
            "actor": actor,
        },
    )
    if not is_new and (entry.amount_micros, entry.reason) != (amount_micros, reason):
        raise ValidationError(f"credit_id {credit_id!r} was given before with another amount or reason")
    return entry


def close_alert(*, actor: str, alert_id: int) -> bool:
    """A person has looked. False when somebody had closed it before."""
    changed = LedgerAlert.objects.filter(id=alert_id, closed_at=None).update(closed_at=timezone.now(), closed_by=actor)
    return bool(changed)
