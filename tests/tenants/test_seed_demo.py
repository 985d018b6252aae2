"""The demo's seed: complete, idempotent, and careful with keys that are in use."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import authenticate
from django.contrib.auth.models import User
from django.core.management import call_command

from billing.selectors import current_policy_document, current_price_version
from scheduler_engine.policy import PriorityClass, cpu_classes, snapshot_from_dict
from tenants import api_keys, selectors, services
from tenants.models import ApiKey, PolicyVersion, QuotaPolicy, Tenant
from tenants.policy_changes import granted


@pytest.fixture(autouse=True)
def _nobody_listens(published: Any) -> None:
    """Publishing goes to a list: no Redis is needed here."""


def seed(*options: str) -> dict[str, Any]:
    output = StringIO()
    call_command("seed_demo", "--json", *options, stdout=output)
    return json.loads(output.getvalue())


def test_each_demo_tenant_gets_a_key_that_opens_its_own_project(db: None) -> None:
    keys = seed()["keys"]
    assert set(keys) == {"aurora", "bulk", "nova", "stranger"}
    for slug, text in keys.items():
        parsed = api_keys.parse(text)
        row = ApiKey.objects.get(public_id=parsed.public_id)
        assert row.tenant.slug == row.project.tenant.slug == slug
        assert row.secret_sha256 == api_keys.digest(parsed.secret)


def test_the_admin_can_log_in_with_the_printed_password(db: None) -> None:
    login = seed()["admin"]
    user = authenticate(username=login["username"], password=login["password"])
    assert user is not None
    assert user.is_superuser


def test_an_admin_whose_name_has_other_capitals_by_now_is_the_admin(db: None) -> None:
    seed()
    User.objects.filter(username="admin").update(username="Admin")
    seed()
    assert list(User.objects.values_list("username", flat=True)) == ["Admin"]


def test_a_second_run_changes_nothing_and_tells_no_secret(db: None) -> None:
    seed()
    before = current_policy_document()
    again = seed()
    assert set(again["keys"].values()) == {None}
    assert again["admin"]["password"] is None
    assert current_policy_document() == before
    assert ApiKey.objects.count() == 4


def test_a_fresh_platform_has_one_policy_version_and_it_says_why(db: None) -> None:
    seed()
    (version,) = PolicyVersion.objects.all()
    assert (version.version, version.actor) == (1, "seed_demo")
    assert version.reason.startswith("The demo's tenants")


def test_keys_and_password_of_a_known_file_are_kept_as_they_are(db: None, tmp_path: Path) -> None:
    first = seed()
    path = tmp_path / "demo.json"
    path.write_text(json.dumps({"base_url": "http://localhost", **first}))
    assert seed(f"--known={path}") == first


def test_what_a_known_file_lacks_is_made_anew_and_the_old_key_is_revoked(db: None, tmp_path: Path) -> None:
    first = seed()
    path = tmp_path / "demo.json"
    path.write_text(json.dumps({"keys": {**first["keys"], "nova": None}, "admin": {"password": "forgotten"}}))
    again = seed(f"--known={path}")
    assert again["keys"]["aurora"] == first["keys"]["aurora"]
    assert again["keys"]["nova"] not in (None, first["keys"]["nova"])
    assert again["admin"]["password"] not in (None, first["admin"]["password"])
    assert [key.tenant.slug for key in ApiKey.objects.exclude(revoked_at=None)] == ["nova"]


@pytest.mark.parametrize("deed", ["revoked", "rotated"])
def test_what_a_person_did_to_a_demo_key_stands_until_all_are_reissued(db: None, tmp_path: Path, deed: str) -> None:
    first = seed()
    path = tmp_path / "demo.json"
    path.write_text(json.dumps(first))
    key = ApiKey.objects.get(tenant__slug="nova")
    if deed == "revoked":
        services.revoke_key(actor="alice", key_id=key.id)
    else:
        services.rotate_key(actor="alice", key_id=key.id, env="demo", grace=timedelta(0))
    for _ in range(2):
        again = seed(f"--known={path}")
        path.write_text(json.dumps(again))
        assert again["keys"] == {**first["keys"], "nova": None}
    assert ApiKey.objects.count() == 4
    assert seed("--reissue")["keys"]["nova"] is not None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"keys": null, "admin": 7}', '{"keys": {"aurora": 5}}'])
def test_a_broken_or_missing_file_only_means_new_keys(db: None, tmp_path: Path, text: str) -> None:
    seed()
    path = tmp_path / "demo.json"
    if text:
        path.write_text(text)
    assert None not in seed(f"--known={path}")["keys"].values()


def test_reissue_makes_everything_anew(db: None) -> None:
    first, again = seed(), seed("--reissue")
    assert not set(first["keys"].values()) & set(again["keys"].values())
    assert ApiKey.objects.filter(revoked_at=None).count() == 4


def test_the_policy_is_the_demos(db: None) -> None:
    seed()
    snapshot = snapshot_from_dict(granted(selectors.current_policy().policy))
    by_slug = {tenant.slug: str(tenant.id) for tenant in Tenant.objects.all()}
    cells = {(cell.tenant_id, cell.priority_class): cell for cell in snapshot.tenants}
    allowed = {
        slug: [label.label for label in PriorityClass if cells[tenant_id, label].allowed]
        for slug, tenant_id in by_slug.items()
    }
    assert snapshot.classes == cpu_classes()
    assert allowed == {
        "aurora": ["interactive", "default", "batch"],
        "bulk": ["default", "batch"],
        "nova": ["default"],
        "stranger": ["default"],
    }
    nova = cells[by_slug["nova"], PriorityClass.DEFAULT]
    assert (nova.requests_per_minute, nova.tokens_per_minute, nova.concurrency) == (60, 6_000, 3)


def test_an_operators_edit_survives_the_next_seed(db: None) -> None:
    seed()
    row = QuotaPolicy.objects.get(tenant__slug="nova", priority_class="default")
    row.requests_per_minute = 5
    services.save_quota(actor="alice", policy=selectors.tenant_class_policy(row))
    seed()
    row.refresh_from_db()
    assert row.requests_per_minute == 5


def test_each_model_is_priced_once(db: None) -> None:
    seed("--model=first")
    version = current_price_version()
    seed("--model=first")
    assert current_price_version() == version
    seed("--model=first", "--model=second")
    prices = current_policy_document()["prices"]
    assert {price["model"] for price in prices} == {"first", "second"}
    assert len(prices) == 18


def test_the_seed_publishes_the_policy_even_when_nothing_is_new(db: None, published: Any) -> None:
    seed()
    published.policies.clear()
    seed()
    assert [document["version"] for document in published.policies] == [selectors.current_policy().version]


def test_the_table_for_people_shows_each_key_once(db: None) -> None:
    output = StringIO()
    call_command("seed_demo", stdout=output)
    lines = output.getvalue().strip().split(os.linesep)
    assert [line.split()[0] for line in lines] == ["aurora", "bulk", "nova", "stranger", "admin"]
    call_command("seed_demo", stdout=(again := StringIO()))
    assert "sk_" not in again.getvalue()
