"""Changes of prices and alerts: keyword-only, actor given, one transaction, told after commit. Ledger lines are
ledger.py's.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.utils import timezone

from billing import selectors
from billing.lines import PriceKey
from billing.models import LARGEST_CORRECTION_MICROS as _MOST
from billing.models import LedgerAlert, LedgerEntry, Price, PriceVersion
from billing.pricing import TokenKind, TokenPrices
from tenants import services as tenant_services
from tenants.audit import change_by
from tenants.models import Tenant
from tenants.models.words import one_direction
from tenants.policy_changes import Change

_KEY_LENGTH = LedgerEntry._meta.get_field("entry_key").max_length or 0


def set_prices(*, actor: str, prices: Mapping[PriceKey, TokenPrices], reason: str = "") -> PriceVersion:
    """The next price list: the current one with these prices in place of its own. Operations reserved before keep
    theirs. Where each stands already, nothing is written and the current list returned.
    """
    with change_by(actor):
        tenant_services.serialise_policy_edits()
        changes = price_changes(selectors.price_list(selectors.current_price_version()).prices, prices)
        if not changes and (current := PriceVersion.objects.first()):
            return current
        version = write_prices(actor=actor, prices=prices)
        tenant_services.record_policy(actor, reason, changes)  # makes everybody read the new list
        return version


def price_changes(start: Mapping[PriceKey, TokenPrices], prices: Mapping[PriceKey, TokenPrices]) -> list[Change]:
    """Those of the prices that differ from where an edit starts."""
    before = selectors.by_place(start)
    return [
        Change(place, kind, before.get(place, {}).get(kind), micros)
        for place, kinds in sorted(selectors.by_place(prices).items())
        for kind, micros in kinds.items()
        if before.get(place, {}).get(kind) != micros
    ]


def write_changes(*, actor: str, changes: Sequence[Change]) -> PriceVersion:
    """``write_prices`` of the prices in force with these changes made to them. Raises ValidationError."""
    current = selectors.price_list(selectors.current_price_version()).prices
    return write_prices(actor=actor, prices=with_changes(current, changes))


def with_changes(current: Mapping[PriceKey, TokenPrices], changes: Sequence[Change]) -> dict[PriceKey, TokenPrices]:
    """The prices of every place that is changed. Raises ValidationError for one that has none."""
    edited: dict[PriceKey, TokenPrices] = {}
    for change in changes:
        model, label = change.place.removeprefix("price ").rsplit(" ", 1)
        standing = edited.get((model, label)) or current.get((model, label))
        if standing is None:
            raise ValidationError(f"{model} has no price in the class {label}")
        edited[model, label] = replace(standing, **{change.field: change.after})
    return edited


def write_prices(*, actor: str, prices: Mapping[PriceKey, TokenPrices]) -> PriceVersion:
    """The rows of it; ``record_policy`` stands in the same transaction. Raises ValidationError for a price that is new;
    one that stands, whatever it is, keeps nobody from setting others.
    """
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
        standing = current.get((row.model, row.priority_class))
        if standing is None or getattr(standing, row.token_kind) != row.micros_per_million:
            row.full_clean(exclude=["price_version"], validate_unique=False, validate_constraints=False)
    Price.objects.bulk_create(rows)
    return version


def adjust(
    *, actor: str, operation_id: uuid.UUID, amount_micros: int, reason: str, adjustment_id: str = ""
) -> LedgerEntry:
    """Repairs an operation's charge by a new line that names it; positive is charged. Raises ValidationError, also
    where more would be taken back than is charged.

    ``adjustment_id`` is the giver's own number, as ``credit_id`` is of a credit.
    """
    _refuse_reason(reason, "An adjustment")
    with transaction.atomic():
        one_at_a_time(operation_id)  # two corrections that fit may not fit together
        entry_key = _entry_key("adjust", adjustment_id)
        booked = LedgerEntry.objects.filter(operation_id=operation_id, entry_key=entry_key).first()
        if booked is not None:
            return _the_same(booked, amount_micros, reason)
        refuse_adjustment(operation_id=operation_id, amount_micros=amount_micros)
        line = LedgerEntry.objects.filter(operation_id=operation_id).earliest("id")
        entry = LedgerEntry(
            operation_id=line.operation_id,
            entry_key=entry_key,
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


def refuse_adjustment(*, operation_id: uuid.UUID, amount_micros: int) -> None:
    """Raises the ValidationError that ``adjust`` would, by the name of the field."""
    charged = selectors.charged_micros(operation_id)
    if charged is None:
        raise ValidationError({"operation_id": "The ledger knows no such operation."})
    if not amount_micros or abs(amount_micros) > _MOST:
        raise ValidationError(
            {"amount_micros": f"An adjustment is not 0; it lies between {-_MOST:,} and {_MOST:,} micro-units."}
        )
    if amount_micros < 0 and charged + amount_micros < 0:
        raise ValidationError(
            {
                "amount_micros": f"The operation is charged {charged:,} micro-units, adjustments included: no more than"
                " that can be taken back. What goes beyond is a credit to its tenant."
            }
        )
    given = selectors.credit_given(operation_id)
    if given is not None and charged + amount_micros > given.amount_micros:
        raise ValidationError(
            {
                "amount_micros": f"The operation is a credit of {given.amount_micros:,} micro-units, of which"
                f" {charged:,} are taken back already: no more than is left can be."
            }
        )


def one_at_a_time(id_: uuid.UUID) -> None:
    """Until the end of the transaction nobody else books what a form of this id says, for whichever tenant, or corrects
    an operation of it.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [id_.int >> 65])


def refuse_credit(*, amount_micros: int) -> None:
    """Raises the ValidationError that ``credit`` would, by the name of the field."""
    if not 0 < amount_micros <= _MOST:
        raise ValidationError({"amount_micros": f"A credit is above 0 and at most {_MOST:,} micro-units."})


def credit(*, actor: str, tenant_id: uuid.UUID, amount_micros: int, reason: str, credit_id: str = "") -> LedgerEntry:
    """Gives a tenant an amount, told by its next statement. Raises ValidationError.

    ``credit_id`` is the giver's own number: given again with the same id, the first entry is returned and nothing
    written.
    """
    refuse_credit(amount_micros=amount_micros)
    _refuse_reason(reason, "A credit")
    if not Tenant.objects.filter(id=tenant_id).exists():
        raise ValidationError(f"no tenant {tenant_id}")
    entry_key = _entry_key("credit", credit_id)
    entry, _ = LedgerEntry.objects.get_or_create(
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
    return _the_same(entry, amount_micros, reason)


def _refuse_reason(reason: str, of: str) -> None:
    if not reason:
        raise ValidationError({"reason": f"{of} has a reason."})
    try:
        one_direction(reason)
    except ValidationError as refusal:
        raise ValidationError({"reason": refusal}) from refusal


def _entry_key(kind: str, given: str) -> str:
    """The giver's own number of a correction, or a new one."""
    entry_key = f"{kind}:{given or uuid.uuid4()}"
    if len(entry_key) > _KEY_LENGTH:
        raise ValidationError(f"{kind}_id has at most {_KEY_LENGTH - len(kind) - 1} characters")
    return entry_key


def _the_same(entry: LedgerEntry, amount_micros: int, reason: str) -> LedgerEntry:
    """An entry that was given again. Raises ValidationError where it says something else."""
    if (entry.amount_micros, entry.reason) != (amount_micros, reason):
        raise ValidationError(f"{entry.entry_key!r} was given before with another amount or reason")
    return entry


def close_alert(*, actor: str, alert_id: int) -> bool:
    """A person has looked. False when somebody had closed it before."""
    changed = LedgerAlert.objects.filter(id=alert_id, closed_at=None).update(closed_at=timezone.now(), closed_by=actor)
    return bool(changed)
