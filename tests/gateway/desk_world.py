"""The policy desk's small world: a policy document, people at the desk, and what their browsers would send."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from django.contrib.auth.models import Permission, User
from django.test import Client

from scheduler_engine.policy import PolicySnapshot, TenantClassPolicy, gpu_classes, snapshot_to_dict
from scheduler_engine.policy import PriorityClass as ClassName
from tenants import services
from tenants.models import PolicyProposal, QuotaPolicy
from tests.gateway.people import signed_in


def document() -> dict[str, Any]:
    cells = [
        TenantClassPolicy(tenant_id=tenant, priority_class=name, weight=weight)
        for tenant, weight in (("aurora", 3), ("nova", 1))
        for name in ClassName
    ]
    return snapshot_to_dict(PolicySnapshot(version=1, classes=gpu_classes(), tenants=tuple(cells)))


def open_house(settings: Any, valkey: str) -> SimpleNamespace:
    """Aurora, and two who may edit policy: Alice and Bob."""
    settings.REDIS_URL, settings.RUBATO_REDIS_PREFIX = valkey, "desk-test:"
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    tenant = services.create_tenant(actor="tests", slug="aurora", name="Aurora")
    return SimpleNamespace(tenant=tenant, alice=staff("alice"), bob=staff("bob"))


def staff(name: str, *, may_edit: bool = True) -> Client:
    user = User.objects.create_user(name, password="x", is_staff=True)
    if may_edit:
        user.user_permissions.add(Permission.objects.get(codename="change_quotapolicy"))
    return signed_in(user)


def form_of(client: Client, page: str = "/operator/policy/", **changes: str) -> dict[str, str]:
    """What a browser would send of the page, with some boxes changed (by the end of their names)."""
    text = client.get(page).content.decode()
    found = {"version": re.findall(r'name="version" value="(\d+)"', text)[0]}
    for box in re.findall(r"<input type=\"(?:text|checkbox)\"[^>]*>", text):
        name = re.findall(r'name="([^"]+)"', box)[0]
        if 'type="checkbox"' in box:
            found.update({name: "on"} if " checked" in box else {})
        else:
            found[name] = re.findall(r'value="([^"]*)"', box)[0]
    for name, options in re.findall(r'<select name="([^"]+)"[^>]*>(.*?)</select>', text):
        found[name] = next(iter(re.findall(r"<option selected>(\w+)", options)), "")  # else the first, empty
    for end, value in changes.items():
        (name,) = [one for one in found if one.endswith(end.replace("__", "."))]
        found[name] = value
    return found


def drafted(client: Client, page: str = "/operator/policy/", **changes: str) -> PolicyProposal:
    answer = client.post(page, form_of(client, page, **changes))
    assert answer.status_code == 302, answer.content.decode()
    return PolicyProposal.objects.get(id=answer["Location"].rstrip("/").split("/")[-1])


def act(client: Client, proposal: PolicyProposal, **form: str) -> str:
    form = {"reason": "they pay more"} | form
    return client.post(f"/operator/policy/edits/{proposal.id}", form, follow=True).content.decode()


def weight() -> int:
    return QuotaPolicy.objects.get(priority_class="default").weight
