"""Who comes to the policy desk, and where its pages lead."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from tenants import services
from tenants.models import PolicyVersion
from tests.gateway.desk_world import act, drafted, open_house, staff


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


@pytest.mark.parametrize("page", ["", "classes", "history", "versions/1"])
def test_only_staff_who_may_change_quotas_come_in(house: Any, page: str) -> None:
    assert house.alice.get(f"/operator/policy/{page}").status_code in (200, 404)
    assert staff("carol", may_edit=False).get(f"/operator/policy/{page}").status_code == 403
    assert Client().get(f"/operator/policy/{page}").status_code == 302


def test_what_does_not_exist_is_not_found(house: Any) -> None:
    nobody = "00000000-0000-7000-8000-000000000000"
    for page in ("versions/99", f"edits/{nobody}", f"edits/{nobody}/preview"):
        assert house.alice.get(f"/operator/policy/{page}").status_code == 404
    assert house.alice.post(f"/operator/policy/pause/{nobody}/default").status_code == 404


def test_a_search_finds_tenants_by_name_and_says_where_there_is_none(house: Any) -> None:
    services.create_tenant(actor="tests", slug="bulk", name="Bulk")
    page = house.alice.get("/operator/policy/?q=bul").content.decode()
    assert ("Bulk" in page, "Aurora" in page) == (True, False)
    assert "No tenant is called" in house.alice.get("/operator/policy/?q=zzz").content.decode()


def test_a_nul_in_a_query_is_a_bad_request_and_no_failure_of_ours(house: Any) -> None:
    assert house.alice.get("/operator/policy/?q=%00").status_code == 400


def test_the_desk_leads_to_the_console_and_to_the_live_page(house: Any) -> None:
    page = house.alice.get("/operator/policy/").content.decode()
    for address, name in (("/console/", "Console"), ("/operator/live", "Live"), ("/admin/", "Admin")):
        assert f'<a href="{address}">{name}</a>' in page


def test_who_may_not_edit_prices_sees_no_way_to_them(house: Any) -> None:
    alice = User.objects.get(username="alice")
    alice.user_permissions.add(Permission.objects.get(codename="view_price"))
    pages = ["/operator/policy/", "/operator/policy/history", "/admin/billing/price/"]
    assert ["/operator/policy/prices" in house.alice.get(page).content.decode() for page in pages] == [False] * 3
    alice.user_permissions.add(Permission.objects.get(codename="change_price"))
    assert ["/operator/policy/prices" in house.alice.get(page).content.decode() for page in pages] == [True] * 3


@pytest.mark.parametrize("page", ["/operator/live", "/admin/tenants/quotapolicy/", "/admin/tenants/priorityclass/"])
def test_who_may_not_edit_the_policy_sees_no_way_to_the_desk(house: Any, page: str) -> None:
    carol = staff("carol", may_edit=False)
    User.objects.get(username="carol").user_permissions.add(*Permission.objects.filter(codename__startswith="view_"))
    assert '"/operator/policy/' not in carol.get(page).content.decode()
    User.objects.get(username="carol").user_permissions.add(Permission.objects.get(codename="change_quotapolicy"))
    assert '"/operator/policy/' in carol.get(page).content.decode()


def test_every_region_of_a_page_has_a_name_of_its_own(house: Any) -> None:
    start = PolicyVersion.objects.first().version
    for number in "78":
        act(house.alice, drafted(house.alice, default__weight=number), action="send")
    proposal = drafted(house.alice, default__weight="9")
    for page in ("", "classes", "history", f"versions/{start + 1}", f"edits/{proposal.id}"):
        names = re.findall(
            r'role="region" aria-label="([^"]+)"', house.alice.get(f"/operator/policy/{page}").content.decode()
        )
        assert names
        assert len(set(names)) == len(names), page
