"""Tenants, keys and policy edits: validated, versioned, told after commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.utils import timezone
from pytest_django import DjangoCaptureOnCommitCallbacks

from billing.selectors import current_policy_document
from scheduler_engine.policy import (
    PriorityClass,
    TenantClassPolicy,
    cpu_classes,
    gpu_classes,
    snapshot_from_dict,
)
from tenants import api_keys, selectors, services
from tenants.forms import Name
from tenants.models import ApiKey, PolicyVersion, QuotaPolicy
from tenants.models import PriorityClass as ClassRow
from tenants.models.words import Named
from tenants.news import News
from tenants.policy_changes import granted

INTERACTIVE, DEFAULT, BATCH = PriorityClass


def cell(account: Any, priority_class: PriorityClass = DEFAULT, **limits: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id=str(account.tenant.id), priority_class=priority_class, **limits)


def test_a_new_tenant_may_use_the_default_class_only(aurora: Any) -> None:
    allowed = dict(QuotaPolicy.objects.filter(tenant=aurora.tenant).values_list("priority_class", "allowed"))
    assert allowed == {"interactive": False, "default": True, "batch": False}


UNREADABLE = {
    "alm": ("night\u061ctxt", "change the direction of writing"),
    "rlm": ("night\u200ftxt", "change the direction of writing"),
    "rlo": ("night\u202etxt", "change the direction of writing"),
    "lri": ("night\u2066txt", "change the direction of writing"),
    "line break": ("night\ntxt", "a name is one line"),
    "carriage return": ("night\rtxt", "a name is one line"),
    "tab": ("night\ttxt", "a name is one line"),
    "line separator": ("night\u2028txt", "a name is one line"),
    "next line": ("night\x85txt", "a name is one line"),
    "zero width": ("\u200b", "nothing of this name can be seen"),
    "soft hyphens": ("\u00ad \u00ad", "nothing of this name can be seen"),
    "joiner": ("\u200d", "nothing of this name can be seen"),
    "byte order mark": ("\ufeff", "nothing of this name can be seen"),
    "Hangul filler": ("\u3164", "nothing of this name can be seen"),
    "Braille blank": ("\u2800\u2800", "nothing of this name can be seen"),
    "a mark alone": ("\ufe0f", "nothing of this name can be seen"),
}


@pytest.mark.parametrize(("name", "words"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_name_that_cannot_be_read_as_one_line_is_refused(aurora: Any, name: str, words: str) -> None:
    own, project = aurora.tenant, aurora.project
    deeds: list[Callable[[], Any]] = [
        lambda: services.create_tenant(actor="tests", slug="nova", name=name),
        lambda: services.update_tenant(actor="tests", tenant_id=own.id, name=name, timezone="UTC", is_active=True),
        lambda: services.create_project(actor="tests", tenant=own, name=name),
        lambda: services.update_project(actor="tests", project_id=project.id, name=name, default_class=BATCH),
        lambda: services.issue_key(actor="tests", project=project, name=name, env="test"),
    ]
    for deed in deeds:
        with pytest.raises(ValidationError, match=words) as refusal:
            deed()
        assert list(refusal.value.message_dict) == ["name"]
    with pytest.raises(ValidationError, match=words):
        Name(strip=False).clean(name)


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "7",
        "!",
        "\u65e5\u672c\u3000\u8a9e",
        "\u0646\u0645\u06cc\u200c\u062f\u0627\u0646\u0645",
        "\U0001f468\u200d\U0001f4bb",
        "\u0e19\u0e35\u0e48",
    ],
)
def test_a_name_in_any_writing_is_taken(aurora: Any, name: str) -> None:
    assert services.create_project(actor="tests", tenant=aurora.tenant, name=name).name == name
    assert Name().clean(name) == name


def test_every_row_with_a_name_is_refused_such_a_one() -> None:
    own = [model for model in apps.get_models() if model.__module__.startswith(("tenants.", "billing.", "gateway."))]
    with_name = [model for model in own if any(field.name == "name" for field in model._meta.fields)]
    assert len(with_name) >= 3
    assert [model.__name__ for model in with_name if not issubclass(model, Named)] == []


def test_a_key_is_stored_as_a_digest_only(aurora: Any) -> None:
    row = ApiKey.objects.get()
    parsed = api_keys.parse(aurora.key.text)
    assert (row.public_id, row.secret_sha256) == (parsed.public_id, api_keys.digest(parsed.secret))
    assert row.tenant == aurora.tenant
    values = [str(getattr(row, field.attname)) for field in ApiKey._meta.concrete_fields]
    assert not any(parsed.secret in value for value in values)


def test_a_revoked_key_is_told_once_and_stays_revoked_by_the_first(
    aurora: Any, published: Any, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        first = services.revoke_key(actor="alice", key_id=aurora.key.key.id)
        second = services.revoke_key(actor="bob", key_id=aurora.key.key.id)
    assert (first, second) == (News(is_told=True), None)
    assert published.keys == [aurora.key.key.public_id]
    assert ApiKey.objects.get().revoked_by == "alice"


def test_switching_a_tenant_off_tells_every_key_of_it(
    aurora: Any, published: Any, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        services.update_tenant(
            actor="alice", tenant_id=aurora.tenant.id, name="Aurora", timezone="UTC", is_active=False
        )
    assert published.keys == [aurora.key.key.public_id]


def test_every_policy_edit_is_a_version_and_is_told_after_the_commit(
    aurora: Any, published: Any, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    before = selectors.current_policy().version
    with django_capture_on_commit_callbacks() as callbacks:
        saved = services.save_quota(actor="alice", policy=cell(aurora, requests_per_minute=7))
    assert (saved.version, saved.actor) == (before + 1, "alice")
    assert published.policies == []
    for callback in callbacks:
        callback()
    assert [document["version"] for document in published.policies] == [saved.version]


def test_an_edit_that_is_rolled_back_is_told_to_nobody(
    aurora: Any, published: Any, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
        services.save_quota(actor="alice", policy=cell(aurora, requests_per_minute=7))
        transaction.set_rollback(True)
    assert published.policies == []


def test_a_publisher_that_is_down_does_not_lose_the_edit(
    aurora: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks,
) -> None:
    def down() -> None:
        raise ConnectionError("Redis is gone")

    monkeypatch.setattr(services, "publish_policy", down)
    with django_capture_on_commit_callbacks(execute=True):
        saved = services.save_quota(actor="alice", policy=cell(aurora, requests_per_minute=7))
    assert PolicyVersion.objects.filter(version=saved.version).exists()
    assert "Redis is gone" in caplog.text


def test_a_version_is_a_whole_policy_that_the_engine_accepts(aurora: Any, stranger: Any) -> None:
    limits = cell(
        aurora, INTERACTIVE, weight=4, tokens_per_minute=0, money_micros=5, money_window="day", overflow_to=BATCH
    )
    services.save_quota(actor="alice", policy=limits)
    snapshot = snapshot_from_dict(granted(selectors.current_policy().policy))
    assert [policy.priority_class for policy in snapshot.classes] == [INTERACTIVE, DEFAULT, BATCH]
    assert limits in snapshot.tenants
    assert len(snapshot.tenants) == 6


def test_class_parameters_go_to_the_rows_and_come_back_equal(db: None) -> None:
    services.save_classes(actor="alice", policies=cpu_classes())
    assert tuple(selectors.class_policy(row) for row in _in_rank_order()) == cpu_classes()


def _in_rank_order() -> list[ClassRow]:
    return sorted(ClassRow.objects.all(), key=lambda row: PriorityClass.from_label(row.label))


def test_a_fresh_database_stands_at_the_gpu_defaults(db: None) -> None:
    assert selectors.live_snapshot(version=0).classes == gpu_classes()


def test_a_lost_class_row_stands_at_its_default(db: None) -> None:
    ClassRow.objects.all().delete()
    assert selectors.live_snapshot(version=0).classes == gpu_classes()


def test_the_document_is_whole_before_the_first_edit(db: None) -> None:
    document = current_policy_document()
    assert (document["version"], document["price_version"], document["prices"]) == (0, 0, [])
    assert snapshot_from_dict(document["policy"]).classes == gpu_classes()


def test_the_document_names_every_tenant(aurora: Any, stranger: Any) -> None:
    tenants = current_policy_document()["tenants"]
    assert tenants[str(aurora.tenant.id)] == {"slug": "aurora", "name": "Aurora", "timezone": "UTC"}
    assert len(tenants) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": 0}, "weight must be at least 1"),
        ({"requests_per_minute": -1}, "must be at least 0"),
        ({"tokens_per_minute": -1}, "must be at least 0"),
        ({"concurrency": -1}, "must be at least 0"),
        ({"money_micros": -1}, "must be at least 0"),
        ({"hard_deadline_ms": 0}, "at least 1"),
        ({"default_max_tokens": 513, "max_tokens_cap": 512}, "must not lie above"),
        ({"money_window": "week"}, "not a valid choice"),
        ({"overflow_to": INTERACTIVE}, "to a lower class"),
    ],
)
def test_a_quota_that_makes_no_sense_is_refused_in_clear_words(aurora: Any, change: dict[str, Any], words: str) -> None:
    before = selectors.current_policy()
    with pytest.raises(ValidationError, match=words):
        services.save_quota(actor="alice", policy=cell(aurora, **change))
    assert selectors.current_policy() == before


def test_no_limit_and_nothing_allowed_are_two_things(aurora: Any) -> None:  # P05
    services.save_quota(actor="alice", policy=cell(aurora, requests_per_minute=None, concurrency=0))
    row = QuotaPolicy.objects.get(tenant=aurora.tenant, priority_class="default")
    assert (row.requests_per_minute, row.concurrency) == (None, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"floor_percent": 101}, "at least 0 and at most 100"),
        ({"floor_percent": 96}, "floors of all classes"),
        ({"cap_slots_percent": -1}, "at least 1 and at most 100"),
        ({"ttft_target_ms": 0}, "at least 1"),
        ({"chunk_min": 0}, "at least 1"),
        ({"chunk_min": 2_000}, "chunk min"),
        ({"governor_off_percent": 6}, "governor off"),
        ({"patience_steps": 1, "patience_ms": 1}, "not both"),
        ({"quantum_steps": 0}, "at least 1"),
    ],
)
def test_class_parameters_that_make_no_sense_are_refused_in_clear_words(
    db: None, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        services.save_class(actor="alice", policy=replace(gpu_classes()[0], **change))


def test_the_database_itself_refuses_what_a_form_would(aurora: Any) -> None:
    with pytest.raises(IntegrityError, match="quota_weight_positive"), transaction.atomic():
        QuotaPolicy.objects.update(weight=0)


@pytest.mark.parametrize("slug", ["", "Aurora", "1st", "a b", "a" * 41, "aurora\n"])
def test_a_slug_is_small_letters_digits_and_hyphens(db: None, slug: str) -> None:
    with pytest.raises(ValidationError):
        services.create_tenant(actor="alice", slug=slug, name="Somebody")


def test_an_unknown_time_zone_is_refused(db: None) -> None:
    with pytest.raises(ValidationError, match="no time zone"):
        services.create_tenant(actor="alice", slug="aurora", name="Aurora", timezone="Middle/Earth")


def test_a_key_cannot_stand_in_one_tenant_and_open_a_project_of_another(aurora: Any, stranger: Any) -> None:
    with pytest.raises(IntegrityError, match="apikey_project_of_its_tenant"), transaction.atomic():
        _move_keys(aurora, stranger)


def _move_keys(aurora: Any, stranger: Any) -> None:
    ApiKey.objects.filter(tenant=aurora.tenant).update(project=stranger.project)
    connection.check_constraints()  # else deferred until the commit


def test_a_saved_policy_version_cannot_be_changed(aurora: Any) -> None:
    with pytest.raises(DatabaseError, match="permission denied"), transaction.atomic():
        PolicyVersion.objects.update(actor="mallory")


def test_a_rotated_key_keeps_its_public_id_and_its_old_secret_for_the_grace(aurora: Any, published: Any) -> None:
    first = aurora.key
    rotated = services.rotate_key(actor="ann", key_id=first.key.id, env="test", grace=timedelta(hours=1))
    stored = ApiKey.objects.get(id=first.key.id)
    old, new = api_keys.parse(first.text), api_keys.parse(rotated.text)
    assert (old.public_id, stored.public_id) == (new.public_id, new.public_id)
    assert (stored.previous_sha256, stored.secret_sha256) == (api_keys.digest(old.secret), api_keys.digest(new.secret))
    assert timedelta(minutes=59) < stored.previous_until - timezone.now() <= timedelta(hours=1)


def test_a_rotation_without_grace_ends_the_old_secret_now(aurora: Any) -> None:
    services.rotate_key(actor="ann", key_id=aurora.key.key.id, env="test", grace=timedelta(0))
    stored = ApiKey.objects.get(id=aurora.key.key.id)
    assert (stored.previous_sha256, stored.previous_until) == ("", None)


@pytest.mark.parametrize("grace", [timedelta(seconds=-1), timedelta(days=31)])
def test_a_grace_out_of_range_is_refused(aurora: Any, grace: timedelta) -> None:
    with pytest.raises(ValidationError, match="grace lies between 0 and 30 days"):
        services.rotate_key(actor="ann", key_id=aurora.key.key.id, env="test", grace=grace)


@pytest.mark.parametrize("end", ["revoked_at", "expires_at"])
def test_a_key_that_has_ended_is_not_rotated(aurora: Any, end: str) -> None:
    ApiKey.objects.filter(id=aurora.key.key.id).update(**{end: timezone.now()})
    with pytest.raises(ValidationError, match="make a new key"):
        services.rotate_key(actor="ann", key_id=aurora.key.key.id, env="test", grace=timedelta(hours=1))


def test_a_key_ends_in_the_future(aurora: Any) -> None:
    for over in (timezone.now(), timezone.now() - timedelta(days=9_999)):
        with pytest.raises(ValidationError, match="ends in the future") as refused:
            services.issue_key(actor="ann", project=aurora.project, name="dead", env="test", expires_at=over)
        assert set(refused.value.message_dict) == {"expires_at"}
    assert not ApiKey.objects.filter(name="dead").exists()
