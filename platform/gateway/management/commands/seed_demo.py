"""``manage.py seed_demo``: four tenants with a project and a key each, prices, and an admin. Writes only what is
missing.
"""

from __future__ import annotations

import hmac
import json
import secrets
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.core.management.base import BaseCommand
from django.db import transaction

from billing import selectors as billing_selectors
from billing import services as billing_services
from billing.pricing import TokenPrices
from scheduler_engine.policy import ClassPolicy, PriorityClass, TenantClassPolicy, cpu_classes, gpu_classes
from tenants import api_keys, members, selectors, services
from tenants.audit import change_by
from tenants.models import ApiKey, Project, Tenant
from tenants.roles import Role
from tenants.user_names import free_name

ACTOR = "seed_demo"
REASON = "The demo's tenants with their limits, the parameters of the classes, and prices."
ADMIN = "admin"
ADMIN_EMAIL = "admin@rubato.example"
MODEL = "smollm2-135m-instruct"
KEY_NAME = "demo"

INTERACTIVE, DEFAULT, BATCH = PriorityClass
STANDARD = TokenPrices(prompt=150_000, cached=75_000, output=600_000)
PRICES = {
    INTERACTIVE: TokenPrices(prompt=300_000, cached=150_000, output=1_200_000),
    DEFAULT: STANDARD,
    BATCH: TokenPrices(prompt=75_000, cached=37_500, output=300_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTenant:
    """``quotas`` holds the limits of the classes it may use; the others are not allowed."""

    slug: str
    name: str
    timezone: str
    default_class: PriorityClass
    quotas: Mapping[PriorityClass, Mapping[str, int]] = field(default_factory=dict)


_PAYING = {"weight": 4, "requests_per_minute": 6_000, "tokens_per_minute": 6_000_000, "concurrency": 256}
_BULK = {"requests_per_minute": 6_000, "tokens_per_minute": 20_000_000, "concurrency": 1_024}
_FREE = {"requests_per_minute": 60, "tokens_per_minute": 6_000, "concurrency": 3}
TENANTS = (
    DemoTenant(
        slug="aurora",
        name="Aurora",
        timezone="Europe/Vienna",
        default_class=INTERACTIVE,
        quotas=dict.fromkeys(PriorityClass, _PAYING),
    ),
    DemoTenant(slug="bulk", name="Bulk", timezone="UTC", default_class=BATCH, quotas={DEFAULT: _BULK, BATCH: _BULK}),
    DemoTenant(slug="nova", name="Nova", timezone="America/New_York", default_class=DEFAULT, quotas={DEFAULT: _FREE}),
    DemoTenant(slug="stranger", name="Stranger", timezone="Asia/Tokyo", default_class=DEFAULT, quotas={DEFAULT: _FREE}),
)


class Command(BaseCommand):
    help = "Makes the demo's tenants, keys, prices and admin where they are missing, and publishes the policy."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help='print {"keys": {slug: key}, "admin": {…}}')
        parser.add_argument(
            "--known",
            type=Path,
            help="a JSON file of that shape: keys and password that still hold are kept, others are made anew, but for "
            "keys that a person has revoked or rotated",
        )
        parser.add_argument("--reissue", action="store_true", help="make all keys and the password anew")
        parser.add_argument("--model", action="append", help=f"model name to price; may repeat (default {MODEL})")
        parser.add_argument("--profile", choices=["cpu", "gpu"], default="cpu", help="class parameters at first seed")

    def handle(self, *args: Any, **options: Any) -> None:
        known: dict[str, str] = {} if options["reissue"] else _known(options["known"])
        renew = options["reissue"] or options["known"] is not None
        with transaction.atomic():
            classes = cpu_classes() if options["profile"] == "cpu" else gpu_classes()
            _policy(classes, options["model"] or [MODEL])
            projects = {demo.slug: _project(demo) for demo in TENANTS}
            keys = {
                slug: _key(project, known.get(slug), renew, may_undo=options["reissue"])
                for slug, project in projects.items()
            }
            password = _admin_password(known.get(ADMIN), renew)
            _own([project.tenant for project in projects.values()])
        services.publish_policy()
        found = {"keys": keys, "admin": {"username": ADMIN, "password": password}}
        self.stdout.write(json.dumps(found) if options["json"] else _table(keys, password))


def _known(path: Path | None) -> dict[str, str]:
    """Secrets by owner. Nothing where the file is missing or none of ours: keys can always be made anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
        secrets_by_owner = {**found["keys"], ADMIN: found["admin"]["password"]} if found else {}
    except (ValueError, TypeError, KeyError):
        return {}
    return {owner: secret for owner, secret in secrets_by_owner.items() if isinstance(secret, str)}


def _policy(classes: Sequence[ClassPolicy], models: list[str]) -> None:
    """One version with what is missing: class parameters before the first version, tenants that are not there yet with
    their quotas, and prices. What exists is an operator's.
    """
    first = classes if selectors.current_policy() is None else ()
    tenants = [demo for demo in TENANTS if not Tenant.objects.filter(slug=demo.slug).exists()]
    prices = _missing_prices(models)
    if not (first or tenants or prices):
        return
    with change_by(ACTOR):
        services.serialise_policy_edits()
        cells: list[TenantClassPolicy] = []
        for demo in tenants:
            tenant = services.write_tenant(slug=demo.slug, name=demo.name, timezone=demo.timezone)
            cells += [_quota(demo, tenant, label) for label in PriorityClass]
        services.write_rows(classes=first, cells=cells)
        if prices:
            billing_services.write_prices(actor=ACTOR, prices=prices)
        services.record_policy(ACTOR, REASON)


def _missing_prices(models: list[str]) -> dict[tuple[str, str], TokenPrices]:
    known = billing_selectors.price_list(billing_selectors.current_price_version()).prices
    return {
        (model, priority_class.label): price
        for model in models
        for priority_class, price in PRICES.items()
        if (model, priority_class.label) not in known
    }


def _project(demo: DemoTenant) -> Project:
    """The tenant's project."""
    tenant = Tenant.objects.get(slug=demo.slug)
    project = Project.objects.filter(tenant=tenant, name=KEY_NAME).first()
    return project or services.create_project(
        actor=ACTOR, tenant=tenant, name=KEY_NAME, default_class=demo.default_class
    )


def _quota(demo: DemoTenant, tenant: Tenant, priority_class: PriorityClass) -> TenantClassPolicy:
    limits: dict[str, Any] = dict(demo.quotas.get(priority_class, {}))
    return TenantClassPolicy(
        tenant_id=str(tenant.id),
        priority_class=priority_class,
        allowed=priority_class in demo.quotas,
        max_tokens_cap=4_096,
        **limits,
    )


def _key(project: Project, known: str | None, renew: bool, may_undo: bool) -> str | None:
    """The project's demo key, as far as it can be told: a text is known when just made or found in the caller's
    file. What a person did to it (revoked it, rotated it) stands, unless ``may_undo``.
    """
    made = ApiKey.objects.filter(project=project, name=KEY_NAME)
    live = list(made.filter(revoked_at=None))
    if known is not None and any(_opens(known, key) for key in live):
        return known
    if live and not renew:
        return None
    newest = made.order_by("created_at").last()
    is_a_persons = newest is not None and (newest.rotated_at is not None or newest.revoked_by not in ("", ACTOR))
    if is_a_persons and not may_undo:
        return None
    for key in live:
        services.revoke_key(actor=ACTOR, key_id=key.id)
    issued = services.issue_key(actor=ACTOR, project=project, name=KEY_NAME, env=settings.RUBATO_KEY_ENVIRONMENT)
    return issued.text


def _opens(text: str, key: ApiKey) -> bool:
    try:
        parsed = api_keys.parse(text)
    except api_keys.MalformedKey:
        return False
    return parsed.public_id == key.public_id and hmac.compare_digest(api_keys.digest(parsed.secret), key.secret_sha256)


def _admin() -> User | None:
    """By that name, or else however an operator has written it since."""
    users = get_user_model().objects
    found: User | None = users.filter(username=ADMIN).first() or users.filter(username__iexact=ADMIN).first()
    return found


def _admin_password(known: str | None, renew: bool) -> str | None:
    user = _admin()
    if user is None:
        free_name(ADMIN, taken=f"somebody was named {ADMIN} just now: seed again")
        password = secrets.token_urlsafe(18)
        get_user_model().objects.create_superuser(ADMIN, password=password)
        return password
    if known is not None and user.check_password(known):
        return known
    if not renew:
        return None
    password = secrets.token_urlsafe(18)
    user.set_password(password)
    user.save(update_fields=["password"])
    return password


def _own(tenants: Iterable[Tenant]) -> None:
    """The admin is an owner of every demo tenant, so that the console can be seen."""
    user = _admin()
    assert user is not None
    for tenant in tenants:
        if members.role_in(user, tenant.id) is None:
            members.add_member(actor=ACTOR, tenant=tenant, user=user, email=ADMIN_EMAIL, role=Role.OWNER)


def _table(keys: Mapping[str, str | None], password: str | None) -> str:
    kept = "(as before; --reissue makes it anew)"
    lines = [f"{slug:<10}{key or kept}" for slug, key in keys.items()]
    return "\n".join([*lines, f"{ADMIN:<10}{password or kept}"])
