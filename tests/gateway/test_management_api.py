"""The management API: a key with a role, its own tenant and nothing else, errors in the OpenAI shape."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from gateway import metrics
from tenants import services
from tenants.models import ApiKey, AuditEvent, Invitation, Membership, Project
from tenants.roles import Role, may
from tests.gateway.management_world import BODIES, NAMED, ROOT, ROUTES, House, as_owner, call, error, open_houses, whole


@pytest.fixture
def houses(transactional_db: None, settings: Any) -> dict[str, House]:
    return open_houses(settings)


@pytest.fixture
def aurora(houses: dict[str, House]) -> House:
    return houses["aurora"]


def test_each_route_is_open_to_the_roles_that_hold_its_capability_and_to_no_other(aurora: House) -> None:
    for method, route, capability in ROUTES:
        for role in Role:
            status = call(
                aurora.management_key(role), method, route.format(**aurora.ids()), {"nonsense": 1}
            ).status_code
            expected = {200, 400} if may(role, capability) else {403}
            assert status in expected, (method, route, role, status)
            if method == "DELETE":
                break  # the object is gone: the roles that may not come first are tried below


def test_who_may_not_delete_is_refused_and_nothing_is_gone(aurora: House) -> None:
    for method, route, capability in ROUTES:
        refused = [role for role in Role if not may(role, capability)] if method == "DELETE" else []
        for role in refused:
            assert call(aurora.management_key(role), method, route.format(**aurora.ids())).status_code == 403
    assert ApiKey.objects.get(id=aurora.key.key.id).revoked_at is None
    assert Membership.objects.filter(id=aurora.member.id).exists()
    assert Invitation.objects.get(id=aurora.invite.id).ended_at is None


@pytest.mark.parametrize(("method", "route"), NAMED)
def test_another_tenants_object_answers_like_one_that_does_not_exist(  # P47, P49
    houses: dict[str, House], method: str, route: str
) -> None:
    bodies = {"projects/{project}/api_keys": {"name": "x"}, "users/{member}": {"role": "admin"}}
    body = bodies.get(route, {"name": "x"} if route == "projects/{project}" else {}) if method == "POST" else None
    foreign = as_owner(houses["aurora"], method, route.format(**houses["stranger"].ids()), body)
    nobody = {name: str(uuid.uuid4()) for name in houses["aurora"].ids()}
    unknown = as_owner(houses["aurora"], method, route.format(**nobody), body)
    assert (foreign.status_code, unknown.status_code) == (404, 404)
    assert foreign.content == unknown.content


def test_no_list_shows_anything_of_another_tenant(houses: dict[str, House]) -> None:
    foreign = houses["stranger"]
    for route in ("projects", "users", "invites", "statements", "audit_logs?limit=100", "usage/export"):
        answer = as_owner(houses["aurora"], "GET", route)
        text = whole(answer)
        assert b"stranger" not in text.lower()
        assert not [name for name, one in foreign.ids().items() if one.encode() in text]


@pytest.mark.parametrize("which", ["none", "inference", "mistyped", "revoked", "unknown", "expired"])
def test_what_is_no_management_key_in_force_opens_nothing(aurora: House, which: str) -> None:
    text = aurora.management_key(Role.OWNER)
    key = ApiKey.objects.get(role="owner")
    if which == "revoked":
        services.revoke_key(actor="tests", key_id=key.id)
    elif which == "expired":
        ApiKey.objects.filter(id=key.id).update(expires_at=timezone.now())
    elif which == "unknown":
        ApiKey.objects.filter(id=key.id).update(public_id="0" * 12)
    given = {"none": None, "inference": aurora.key.text, "mistyped": text[:-1] + "!"}.get(which, text)
    answer = call(given, "GET", "projects")
    assert (answer.status_code, error(answer)["code"], answer["WWW-Authenticate"]) == (401, "invalid_api_key", "Bearer")


def test_a_key_in_the_query_string_is_refused(aurora: House) -> None:  # P70
    answer = call(aurora.management_key(Role.OWNER), "GET", "projects?api_key=x")
    assert (answer.status_code, "never in the URL" in error(answer)["message"]) == (401, True)


def test_a_key_is_made_shown_once_rotated_and_revoked(aurora: House) -> None:
    made = as_owner(aurora, "POST", f"projects/{aurora.project.pk}/api_keys", {"name": "ci"}).json()
    assert made["value"].startswith("sk_")
    shown = as_owner(aurora, "GET", f"api_keys/{made['id']}").json()
    assert "value" not in shown
    rotated = as_owner(aurora, "POST", f"api_keys/{made['id']}/rotate", {"grace_seconds": 60}).json()
    assert rotated["value"] != made["value"]
    assert rotated["previous_secret_until"] is not None
    assert as_owner(aurora, "DELETE", f"api_keys/{made['id']}").json()["deleted"] is True
    assert as_owner(aurora, "GET", f"api_keys/{made['id']}").json()["revoked_at"] is not None


def test_a_key_never_makes_a_key_that_may_do_more(aurora: House) -> None:
    route = f"projects/{aurora.project.pk}/api_keys"
    answer = call(aurora.management_key(Role.DEVELOPER), "POST", route, {"name": "x", "role": "owner"})
    assert answer.status_code == 403
    assert as_owner(aurora, "POST", route, {"name": "x", "role": "auditor"}).json()["role"] == "auditor"


@pytest.mark.parametrize(
    ("method", "route", "body", "param"),
    [
        ("POST", "projects", {}, "name"),
        ("POST", "projects", {"name": "x", "default_class": "urgent"}, "default_class"),
        ("POST", "projects", {"name": "x", "tenant_id": "y"}, "tenant_id"),
        ("POST", "projects", {"name": "main"}, None),
        ("POST", "projects", [], None),
        ("POST", "invites", {"email": "nobody", "role": "admin"}, "email"),
        ("POST", "invites", {"email": "x@y.example", "role": "king"}, "role"),
        ("POST", "api_keys/{key}/rotate", {"grace_seconds": -1}, "grace_seconds"),
        ("POST", "projects/{project}/api_keys", {"name": "x", "expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ("GET", "projects?limit=0", None, "limit"),
        ("GET", "projects?after=nonsense", None, "after"),
        ("GET", "audit_logs?after=x", None, "after"),
        ("GET", "usage/completions", None, "start_time"),
        ("GET", "usage/completions?start_time=x", None, "start_time"),
        ("GET", "usage/completions?start_time=9999999999&end_time=1", None, "start_time"),
        ("GET", "usage/completions?start_time=1&bucket_width=1w", None, "bucket_width"),
        ("GET", "usage/completions?start_time=1&bucket_width=1h&limit=169", None, "limit"),
        ("GET", "usage/completions?start_time=1&group_by[]=weather", None, "group_by"),
        ("GET", "usage/completions?start_time=1&project_ids=1", None, "project_ids"),
        ("GET", "usage/completions?start_time=1&page=7", None, "page"),
        ("GET", "usage/export?format=xml", None, "format"),
        ("GET", "statements/{statement}?format=doc", None, "format"),
    ],
)
def test_bad_input_is_refused_by_name(aurora: House, method: str, route: str, body: Any, param: str | None) -> None:
    before = AuditEvent.objects.count()
    answer = as_owner(aurora, method, route.format(**aurora.ids()), body)
    refused = error(answer)
    assert (answer.status_code, refused["param"]) == (400, param)
    assert param is None or repr(param) in refused["message"]
    assert AuditEvent.objects.count() - before <= 1  # the owner's key itself


@pytest.mark.parametrize(
    ("method", "route", "body", "name"),
    [
        ("GET", "usage/completions", None, "start_time"),
        ("GET", "costs", None, "start_time"),
        ("POST", "projects", {}, "name"),
    ],
)
def test_what_is_missing_is_refused_as_everywhere_under_v1(
    aurora: House, method: str, route: str, body: Any, name: str
) -> None:
    refused = error(as_owner(aurora, method, route, body))
    assert (refused["code"], refused["param"]) == ("missing_required_parameter", name)
    assert refused["message"].startswith(f"Missing required parameter: {name!r}")


@pytest.mark.parametrize(("method", "route"), [(method, route) for method, route, _ in ROUTES])
def test_no_route_leaves_out_a_parameter_in_silence(aurora: House, method: str, route: str) -> None:
    """Whatever it is; before anything is done."""
    before = Project.objects.count(), ApiKey.objects.filter(revoked_at=None).count(), Membership.objects.count()
    asked = route.format(**aurora.ids())
    answer = as_owner(aurora, method, f"{asked}{'&' if '?' in asked else '?'}surprise=1")
    refused = error(answer)
    assert (answer.status_code, refused["code"], refused["param"]) == (400, "unknown_parameter", "surprise")
    after = Project.objects.count(), ApiKey.objects.filter(revoked_at=None).count(), Membership.objects.count()
    assert after == (before[0], before[1] + 1, before[2])  # the owner's key itself


@pytest.mark.parametrize(("method", "route"), [(method, route) for method, route, _ in ROUTES if method != "GET"])
def test_no_writing_route_leaves_out_an_idempotency_key_in_silence(aurora: House, method: str, route: str) -> None:
    """A retry that believes itself guarded makes a second key, or rotates the first answer's secret away."""
    body = BODIES.get((method, route))
    text, asked = aurora.management_key(Role.OWNER), route.format(**aurora.ids())
    before = AuditEvent.objects.count()
    answer = call(text, method, asked, body, {"Idempotency-Key": "k1"})
    refused = error(answer)
    assert (answer.status_code, refused["code"]) == (400, "unsupported_parameter")
    assert refused["param"] == "Idempotency-Key"
    assert len(refused["message"].split(". ")) == 3  # what, where, and what a retry meets
    assert AuditEvent.objects.count() == before
    assert call(text, method, asked, body).status_code in (200, 201)


def test_a_reading_route_has_nothing_that_an_idempotency_key_would_guard(aurora: House) -> None:
    text = aurora.management_key(Role.OWNER)
    assert call(text, "GET", "projects", headers={"Idempotency-Key": "k1"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "route", "body", "status"),
    [
        ("GET", "nonsense", None, 404),
        ("GET", "projects/nonsense", None, 404),
        ("GET", "projects/non%0Asense", None, 404),
        ("PUT", "projects", {}, 405),
        ("POST", "nonsense", {}, 404),
        ("DELETE", "nonsense", None, 404),
        ("GET", "usage/completions?start_time=1&models[]=%00", None, 400),
        ("POST", "projects", b"{", 400),
        ("POST", "projects", b"\xff\xfe", 400),
    ],
)
def test_every_failure_is_json(aurora: House, method: str, route: str, body: Any, status: int) -> None:
    answer = as_owner(aurora, method, route, body)
    assert answer.status_code == status
    error(answer)


@pytest.mark.parametrize(
    ("method", "route", "headers", "status"),
    [
        ("GET", "projects", {}, 200),
        ("GET", "nonsense", {}, 404),
        ("GET", "projects/00000000-0000-4000-8000-000000000000", {}, 404),
        ("PUT", "projects", {}, 405),
        ("GET", "projects?after=x", {}, 400),
        ("GET", "costs?start_time=1&models=%00", {}, 400),
        ("GET", "projects", {"Host": "nowhere.example"}, 400),
        ("GET", "projects", {"Authorization": "Bearer no"}, 401),
        ("GET", "schema", {}, 200),
    ],
)
def test_every_answer_has_its_own_request_id_and_is_counted(
    aurora: House, method: str, route: str, headers: dict[str, str], status: int
) -> None:
    text = aurora.management_key(Role.OWNER)
    label = (str(status), "management")
    before = metrics.counters.requests[label]
    asked = {"Authorization": f"Bearer {text}", "X-Request-Id": "mine", **headers}
    answers = [Client().generic(method, f"{ROOT}/{route}", headers=asked) for _ in range(2)]
    ids = [answer["x-request-id"] for answer in answers]
    assert [answer.status_code for answer in answers] == [status, status]
    assert all(one.startswith("req_") for one in ids)
    assert ids[0] != ids[1]
    assert metrics.counters.requests[label] == before + 2


def test_pages_for_people_are_no_calls_of_the_api(db: None) -> None:
    before = dict(metrics.counters.requests)
    assert "x-request-id" not in Client().get("/").headers
    assert metrics.counters.requests == before


def test_a_form_is_no_json(aurora: House) -> None:
    answer = Client().post(
        f"{ROOT}/projects", {"name": "x"}, headers={"Authorization": f"Bearer {aurora.management_key(Role.OWNER)}"}
    )
    assert (answer.status_code, error(answer)["code"]) == (415, "unsupported_media_type")


def test_pages_follow_each_other_without_gap_or_repeat(aurora: House) -> None:
    for number in range(4):
        services.create_project(actor="tests", tenant=aurora.tenant, name=f"p{number}")
    seen: list[str] = []
    after = ""
    while True:
        found = as_owner(aurora, "GET", f"projects?limit=2&after={after}" if after else "projects?limit=2").json()
        seen += [one["id"] for one in found["data"]]
        if not found["has_more"]:
            break
        after = found["last_id"]
    assert seen == [str(one.id) for one in Project.objects.filter(tenant=aurora.tenant).order_by("-created_at", "-pk")]


def test_a_change_is_on_the_trail_with_its_key_request_and_reason(aurora: House) -> None:
    text = aurora.management_key(Role.OWNER)
    headers = {"Authorization": f"Bearer {text}", "X-Audit-Reason": "new team"}
    body = {"name": "web"}
    answer = Client().post(f"{ROOT}/projects", body, content_type="application/json", headers=headers)
    (event,) = [one for one in as_owner(aurora, "GET", "audit_logs").json()["data"] if one["type"] == "project.insert"][
        :1
    ]
    assert event["object_id"] == answer.json()["id"]
    assert event["actor"].startswith("key:owner ")
    assert (event["reason"], event["request_id"]) == ("new team", answer["x-request-id"])


def test_the_schema_describes_every_route_and_needs_no_key(db: None) -> None:
    schema = Client().get(f"{ROOT}/schema").json()
    described = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    routes = {(method, route.split("?")[0].replace("{", "").replace("}", "")) for method, route, _ in ROUTES}
    assert len(described) >= len(routes)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=1&limit=2", "limit"),
        ("start_time=1&start_time=1", "start_time"),
        ("start_time=1&limit[]=2", "limit[]"),
        ("start_time[]=1", "start_time[]"),
    ],
)
def test_a_parameter_of_one_value_that_comes_twice_or_as_a_list_is_refused(
    aurora: House, query: str, param: str
) -> None:
    refused = call(aurora.management_key(Role.ADMIN), "GET", f"usage/completions?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    listed = "usage/completions?start_time=1&group_by=model&group_by[]=project_id&models=a&models=b"
    assert call(aurora.management_key(Role.ADMIN), "GET", listed).status_code == 200
