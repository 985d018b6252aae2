"""The policy desk: what its forms take, what an edit would have refused at the door, and how an edit gets in force."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from billing.models import UsageRequest
from gateway.desk import forms, preview
from gateway.desk.door_preview import Call, refused
from gateway.desk.preview import Previews
from scheduler_engine.policy import PolicySnapshot, TenantClassPolicy, gpu_classes, snapshot_to_dict
from scheduler_engine.policy import PriorityClass as ClassName
from tenants import selectors, services
from tenants.models import AuditEvent, PolicyProposal, PolicyVersion, QuotaPolicy

PLACE = "aurora default"
SECOND = 1_000_000


def document() -> dict[str, Any]:
    cells = [
        TenantClassPolicy(tenant_id=tenant, priority_class=name, weight=weight)
        for tenant, weight in (("aurora", 3), ("nova", 1))
        for name in ClassName
    ]
    return snapshot_to_dict(PolicySnapshot(version=1, classes=gpu_classes(), tenants=tuple(cells)))


def posted(start: dict[str, Any], **changes: str) -> dict[str, str]:
    """Aurora's default cell as a browser sends it."""
    (row,) = [one for one in start["tenants"] if (one["tenant_id"], one["priority_class"]) == ("aurora", "default")]
    found = {name: "" if row[name] is None else str(row[name]) for name in forms.CELL_FIELDS}
    found["allowed"] = "on"
    found.update(changes)
    return {f"aurora.default.{name}": value for name, value in found.items() if value != "absent"}


def cell_of(made: forms.Edited) -> dict[str, Any]:
    return next(row for row in made.document["tenants"] if row["priority_class"] == "default")


# --- forms


def test_an_untouched_form_changes_nothing() -> None:
    start = document()
    made = forms.edited(start, posted(start))
    assert (made.document, made.wrong) == (start, {})


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("weight", "7", 7),
        ("concurrency", "", None),
        ("concurrency", "0", 0),
        ("tokens_per_minute", "1 000,000", 1_000_000),
    ],
)
def test_a_number_is_read(field: str, text: str, value: int | None) -> None:
    made = forms.edited(document(), posted(document(), **{field: text}))
    assert (cell_of(made)[field], made.wrong) == (value, {})


@pytest.mark.parametrize(
    ("field", "text"),
    [("weight", ""), ("weight", "0"), ("weight", "-1"), ("weight", "NaN"), ("weight", "1e3"), ("weight", "٣"),
     ("concurrency", "-1"), ("hard_deadline_ms", "0"), ("money_window", "year"), ("tokens_per_minute", "9" * 30),
     ("overflow_to", "interactive"), ("overflow_to", "default"), ("overflow_to", "nowhere")],
)  # fmt: skip
def test_what_the_engine_would_refuse_is_said_at_its_box(field: str, text: str) -> None:
    made = forms.edited(document(), posted(document(), **{field: text}))
    assert list(made.wrong) == [f"aurora.default.{field}"]
    assert made.document == document()


def test_where_a_class_overflows_to_is_read_and_offered_only_downwards() -> None:
    made = forms.edited(document(), posted(document(), overflow_to="batch"))
    assert (cell_of(made)["overflow_to"], made.wrong) == ("batch", {})
    assert cell_of(forms.edited(made.document, posted(made.document, overflow_to="")))["overflow_to"] is None
    (row, *_) = forms.cells(document(), {}, ["aurora"])
    (box,) = [one for one in row.boxes if one.label == "overflow_to"]
    assert (row.priority_class, box.kind, box.lower_classes) == ("interactive", "class", ["default", "batch"])


def test_an_unticked_box_takes_the_class_away() -> None:
    made = forms.edited(document(), posted(document(), allowed="absent"))
    assert cell_of(made)["allowed"] is False


def test_a_cell_that_was_not_on_the_page_is_left_alone() -> None:
    assert forms.edited(document(), {}).document == document()


def test_class_parameters_are_read_the_same_way() -> None:
    made = forms.edited(document(), {"class.batch.floor_percent": "7", "class.batch.ttft_target_ms": "x"})
    assert made.document["classes"]["batch"]["floor_percent"] == 7
    assert list(made.wrong) == ["class.batch.ttft_target_ms"]


def test_weights_are_shown_as_shares_of_the_class() -> None:
    start = document()
    start["tenants"][-1]["allowed"] = False
    table = forms.cells(start, {"aurora": "Aurora", "nova": "Nova"}, ["aurora", "nova"])
    shares = {(cell.tenant, cell.priority_class): cell.share_percent for cell in table}
    assert (shares["Aurora", "default"], shares["Nova", "default"]) == (75.0, 25.0)
    assert (shares["Aurora", "batch"], shares["Nova", "batch"]) == (100.0, None)


# --- at the door


def call(at_s: float, length_s: float = 0.0, reserved: int = 10, used: int = 10) -> Call:
    return Call(int(at_s * SECOND), int((at_s + length_s) * SECOND), PLACE, reserved, used)


def would_refuse(calls: list[Call], **limits: Any) -> dict[str, int]:
    none = {"allowed": True, "requests_per_minute": None, "tokens_per_minute": None, "concurrency": None}
    (found,) = refused(calls, {PLACE: {**none, **limits}})
    assert found.num_calls == len(calls)
    return dict(found.by_limit)


def test_without_limits_nothing_is_refused() -> None:
    assert would_refuse([call(0.0) for _ in range(99)]) == {}


def test_a_class_that_is_taken_away_refuses_all() -> None:
    assert would_refuse([call(0.0), call(1.0)], allowed=False) == {"not allowed": 2}


def test_requests_a_minute_refill_with_time() -> None:
    assert would_refuse([call(0.0), call(0.0), call(0.0)], requests_per_minute=2) == {"requests a minute": 1}
    assert would_refuse([call(0.0), call(0.0), call(30.0)], requests_per_minute=2) == {}
    assert would_refuse([call(0.0), call(0.0), call(29.9)], requests_per_minute=2) == {"requests a minute": 1}


def test_tokens_that_were_not_used_come_back_at_the_end_of_a_call() -> None:
    long, short = call(0.0, 5.0, reserved=100, used=10), call(6.0, reserved=85)
    assert would_refuse([long, short], tokens_per_minute=100) == {}
    assert would_refuse([long, call(4.0, reserved=85)], tokens_per_minute=100) == {"tokens a minute": 1}


def test_a_call_that_would_be_refused_takes_nothing() -> None:
    assert would_refuse(
        [call(0.0, reserved=99), call(0.0, reserved=50), call(0.0, reserved=1)], tokens_per_minute=100
    ) == {"tokens a minute": 1}


def test_calls_at_once_are_counted_until_they_end() -> None:
    assert would_refuse([call(0.0, 2.0), call(1.0), call(2.0)], concurrency=1) == {"at once": 1}


def test_places_without_an_edit_are_not_looked_at() -> None:
    assert refused([call(0.0)], {"nova batch": {}}) == []


# --- the pages


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    settings.REDIS_URL, settings.RUBATO_REDIS_PREFIX = valkey, "desk-test:"
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    tenant = services.create_tenant(actor="tests", slug="aurora", name="Aurora")
    return SimpleNamespace(tenant=tenant, alice=staff("alice"), bob=staff("bob"))


def staff(name: str, *, may_edit: bool = True) -> Client:
    user = User.objects.create_user(name, password="x", is_staff=True)
    if may_edit:
        user.user_permissions.add(Permission.objects.get(codename="change_quotapolicy"))
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


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
    return client.post(f"/operator/policy/edits/{proposal.id}", form, follow=True).content.decode()


def weight() -> int:
    return QuotaPolicy.objects.get(priority_class="default").weight


def test_an_edit_is_seen_first_and_then_put_in_force(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert re.search(r"Aurora, default</th><td>weight</td><td>1</td><td>7</td>", page)
    assert weight() == 1
    assert "In force: version" in act(house.alice, proposal, action="send", reason="they pay more")
    assert weight() == 7
    event = AuditEvent.objects.filter(object_type="quotapolicy", action="update").first()
    assert (event.actor, event.reason[:4], event.after) == ("alice", "they", {"weight": 7})
    assert PolicyVersion.objects.first().reason == "they pay more"


def test_class_parameters_are_edited_the_same_way(house: Any) -> None:
    proposal = drafted(house.alice, "/operator/policy/classes", batch__floor_percent="7")
    act(house.alice, proposal, action="send")
    assert selectors.live_snapshot(0).classes[ClassName.BATCH].floor_percent == 7


def test_a_wrong_box_keeps_what_was_typed_and_says_what_would_be_right(house: Any) -> None:
    answer = house.alice.post("/operator/policy/", form_of(house.alice, default__weight="many"))
    page = answer.content.decode()
    assert 'value="many"' in page
    assert "a whole number from 1 to 1000000" in page
    assert not PolicyProposal.objects.exists()


def test_a_form_that_changes_nothing_says_so(house: Any) -> None:
    page = house.alice.post("/operator/policy/", form_of(house.alice)).content.decode()
    assert "this edit changes nothing" in page


def test_two_admins_who_edit_the_same_field_meet_at_a_conflict(house: Any) -> None:
    first, second = drafted(house.alice, default__weight="7"), drafted(house.bob, default__weight="9")
    act(house.alice, first, action="send")
    page = act(house.bob, second, action="send")
    assert "Somebody has edited the same since" in page
    assert (weight(), PolicyProposal.objects.get(id=second.id).state) == (7, "conflict")


def test_two_admins_who_edit_different_fields_both_get_theirs(house: Any) -> None:
    first, second = drafted(house.alice, default__weight="7"), drafted(house.bob, default__concurrency="9")
    act(house.alice, first, action="send")
    act(house.bob, second, action="send")
    row = QuotaPolicy.objects.get(priority_class="default")
    assert (row.weight, row.concurrency) == (7, 9)


def test_nobody_sends_off_the_draft_of_another(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    assert "this draft is alice&#x27;s" in act(house.bob, proposal, action="send")
    assert weight() == 1


def test_with_approval_on_another_person_puts_it_in_force(house: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = drafted(house.alice, default__weight="7")
    assert "The edit waits" in act(house.alice, proposal, action="send")
    assert "cannot approve it" in act(house.alice, proposal, action="approve")
    assert "In force" in act(house.bob, proposal, action="approve")
    assert weight() == 7


def test_a_moment_in_the_future_is_waited_for(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    act(house.alice, proposal, action="send", effective_from="2100-01-01T08:00")
    found = PolicyProposal.objects.get(id=proposal.id)
    assert (found.state, found.effective_from) == ("waiting", datetime(2100, 1, 1, 8, tzinfo=UTC))
    assert "is withdrawn" in act(house.bob, proposal, action="withdraw")
    assert weight() == 1


def test_a_moment_that_is_none_is_refused(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    assert "write the moment as" in act(house.alice, proposal, action="send", effective_from="tomorrow")


def test_going_back_is_shown_first_and_then_done(house: Any) -> None:
    start = PolicyVersion.objects.first().version
    act(house.alice, drafted(house.alice, default__weight="7"), action="send")
    page = house.alice.get(f"/operator/policy/versions/{start}").content.decode()
    assert re.search(r"<td>weight</td><td>7</td><td>1</td>", page)
    answer = house.alice.post(f"/operator/policy/versions/{start}", {"version": start + 1}, follow=True)
    assert f"it equals version {start}" in answer.content.decode()
    assert weight() == 1
    stale = house.alice.post(f"/operator/policy/versions/{start + 1}", {"version": start + 1}, follow=True)
    assert "since you looked" in stale.content.decode()


def test_an_emergency_pause_is_in_force_at_once_and_on_record(house: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    place = f"/operator/policy/pause/{house.tenant.id}/default"
    house.alice.post(place, {"action": "pause", "reason": "runaway"})
    assert QuotaPolicy.objects.get(priority_class="default").allowed is False
    assert PolicyVersion.objects.first().reason == "emergency: paused. runaway"
    house.alice.post(place, {"action": "resume"})
    assert QuotaPolicy.objects.get(priority_class="default").allowed is True


def test_the_door_is_asked_about_the_calls_of_the_last_hour(house: Any) -> None:
    now = timezone.now()
    for number in range(3):
        UsageRequest.objects.create(
            id=f"00000000-0000-7000-8000-{number:012d}",
            tenant_id=house.tenant.id,
            priority_class="default",
            reserved_at=now - timedelta(minutes=5),
            ended_at=now - timedelta(minutes=4),
            state="completed",
            reserved_tokens=10,
        )
    proposal = drafted(house.alice, default__concurrency="1")
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert "3 calls came; refused would have been 2 (at once)" in page


@pytest.mark.parametrize(
    ("is_granted", "words"),
    [(True, "sent to batch, as far as its limits hold, would have been 1"), (False, "refused would")],
)
def test_calls_are_said_to_overflow_only_where_the_lower_class_is_granted(
    house: Any, is_granted: bool, words: str
) -> None:
    batch = QuotaPolicy.objects.get(priority_class="batch")
    batch.allowed = is_granted
    services.save_quota(actor="tests", policy=selectors.tenant_class_policy(batch))
    now = timezone.now()
    for number in range(2):
        UsageRequest.objects.create(
            id=f"00000000-0000-7000-8000-{number:012d}",
            tenant_id=house.tenant.id,
            priority_class="default",
            reserved_at=now - timedelta(minutes=1),
            ended_at=now,
            state="completed",
        )
    proposal = drafted(house.alice, default__requests_per_minute="1", default__overflow_to="batch")
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert words in page
    assert "<td>overflow_to</td><td>refused</td><td>batch</td>" in page


def test_while_redis_is_away_an_edit_can_still_be_seen_and_saved(house: Any, settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    proposal = drafted(house.alice, default__weight="7")
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert "The replay failed: Redis does not answer" in page
    act(house.alice, proposal, action="send")
    assert weight() == 7


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


# --- the replay


@pytest.fixture
def previews(valkey: str, settings: Any, tmp_path: Any) -> Previews:
    settings.REDIS_URL, settings.RUBATO_REDIS_PREFIX = valkey, "desk-test:"
    settings.RUBATO_RECORDED_DIR = str(tmp_path / "recorded")
    return Previews()


@pytest.fixture(scope="module")
def recorded_story(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Any:
    """A short trace on the small device, as a worker records it."""
    folder = tmp_path_factory.mktemp("recorded")
    trace = project_root / "traces" / "azure2023_conv.csv.gz"
    command = [sys.executable, "-m", "gpu_worker.simulate", "--trace", f"interactive={trace}", "--limit", "20"]
    subprocess.run(
        [*command, "--device", "h200-8b", "--record", str(folder)], check=True, cwd=project_root, capture_output=True
    )
    return SimpleNamespace(folder=folder, policy=snapshot_to_dict(PolicySnapshot(version=2, classes=gpu_classes())))


def settled(previews: Previews, draft_id: str) -> preview.Preview:
    """Waits for the thread that watches the replay, not for a time."""
    for thread in threading.enumerate():
        if thread.name == "policy preview":
            thread.join(60)
    found = previews.find(draft_id)
    assert found is not None
    return found


def test_without_a_recording_the_preview_says_so(previews: Previews) -> None:
    assert previews.start("draft", document()).doing == "no worker has recorded any traffic here yet"


def test_a_recorded_story_is_replayed_under_the_edit(previews: Previews, recorded_story: Any, settings: Any) -> None:
    settings.RUBATO_RECORDED_DIR = str(recorded_story.folder)
    edit = copy.deepcopy(recorded_story.policy)
    edit["classes"]["batch"]["floor_percent"] = 0
    assert previews.start("draft", edit).state == "running"
    found = settled(previews, "draft")
    assert (found.state, found.percent) == ("done", 100), found
    assert set(found.result) >= {"happened", "model", "what_if", "error_percent"}


def test_a_log_that_cannot_be_read_is_told_in_a_sentence(previews: Previews, settings: Any) -> None:
    folder = Path(settings.RUBATO_RECORDED_DIR)
    folder.mkdir()
    previews.start("draft", document())
    found = settled(previews, "draft")
    assert found.state == "failed"
    assert "Traceback" not in found.doing
    assert found.doing


def test_a_stopped_preview_stays_stopped(previews: Previews, recorded_story: Any, settings: Any) -> None:
    settings.RUBATO_RECORDED_DIR = str(recorded_story.folder)
    previews.start("draft", recorded_story.policy)
    previews.stop("draft")
    assert settled(previews, "draft").state == "stopped"
