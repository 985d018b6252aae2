"""Webhooks: who may name an address, which addresses are called, what is told, signed, tried again and given up."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.test import Client
from django.utils import timezone

from gateway.batches.models import Batch
from gateway.webhooks import services as webhooks
from gateway.webhooks import tasks
from gateway.webhooks.models import EVENTS, Delivery, Endpoint
from gateway.webhooks.sending import NOT_REACHED, ForbiddenAddress, Outcome, check_url, post
from gateway.webhooks.signing import secret_of, signature
from tenants import services
from tenants.models import AuditEvent
from tenants.roles import Capability, Role, may
from tests.gateway.people import person

URL = "https://aurora.example/hook?a=1"


class House:
    """A tenant with an endpoint and a key."""

    def __init__(self, slug: str = "aurora") -> None:
        self.slug = slug
        self.tenant = services.create_tenant(actor="tests", slug=slug, name=slug.title())
        self.project = services.create_project(actor="tests", tenant=self.tenant, name="main")
        self.key = services.issue_key(actor="tests", project=self.project, name="app", env="test").key
        self.endpoint = webhooks.add(actor="tests", tenant=self.tenant, url=URL, events=EVENTS)

    def person(self, role: Role) -> Client:
        return person(self.tenant, role)

    def at(self, page: str) -> str:
        return f"/console/{self.slug}/{page}"

    def batch(self, status: str, **changes: Any) -> Batch:
        now = timezone.now()
        return Batch.objects.create(
            tenant=self.tenant,
            project=self.project,
            key_id=self.key.id,
            key_public_id=self.key.public_id,
            endpoint="/v1/responses",
            input_file_id=uuid.uuid4(),
            output_lifetime_s=1,
            expires_at=now,
            status=status,
            **{f"{status}_at": now, **changes},
        )


@pytest.fixture
def house(transactional_db: None) -> House:
    return House()


class Receiver:
    """Answers with the statuses it is given, then with 200."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.sent: list[tuple[str, bytes, dict[str, str]]] = []

    def __call__(self, url: str, body: bytes, headers: dict[str, str]) -> Outcome:
        self.sent.append((url, body, headers))
        return Outcome(self.statuses.pop(0) if self.statuses else 200)


def test_the_signature_is_that_of_the_specification() -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signed = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_an_end_of_a_batch_is_told_once_signed_and_settled(house: House) -> None:
    batch, receiver = house.batch("completed", num_lines=3, num_completed=2, num_failed=1), Receiver()
    for _ in range(2):
        now = timezone.now()
        tasks.announce(now)
        tasks.deliver(now, receiver)
    ((url, body, headers),) = receiver.sent
    told = json.loads(body)
    assert (url, told["type"], told["data"]["id"]) == (URL, "batch.completed", f"batch_{batch.id.hex}")
    assert told["data"]["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    delivery = Delivery.objects.get()
    assert headers["webhook-id"] == f"msg_{delivery.id.hex}"
    expected = signature(
        secret_of(house.endpoint.id, 1), headers["webhook-id"], int(headers["webhook-timestamp"]), body
    )
    assert headers["webhook-signature"] == expected
    assert (delivery.state, delivery.last_status, delivery.num_attempts) == ("delivered", 200, 1)


def test_each_event_is_told_to_who_asked_for_it_and_to_no_other_tenant(house: House) -> None:
    nova = House("nova")
    only_keys = webhooks.add(actor="tests", tenant=house.tenant, url=URL, events=["key.revoked"])
    for status in ("completed", "failed", "expired", "cancelled", "finalizing"):
        house.batch(status)
    services.revoke_key(actor="ann", key_id=house.key.id)
    tasks.announce(timezone.now())
    expected = {"batch.completed", "batch.failed", "batch.expired", "batch.cancelled", "key.revoked"}
    assert set(Delivery.objects.filter(endpoint=house.endpoint).values_list("event", flat=True)) == expected
    (told,) = Delivery.objects.filter(endpoint=only_keys)
    assert told.payload["data"] == {"id": str(house.key.id), "name": "app", "revoked_by": "ann"}
    assert not Delivery.objects.filter(endpoint=nova.endpoint).exists()


def test_to_remove_an_endpoint_is_asked_first_and_says_what_goes_with_it(house: House) -> None:
    house.batch("completed")
    tasks.announce(timezone.now())
    owner, place = house.person(Role.OWNER), house.at(f"webhooks/{house.endpoint.id}/remove")
    page = owner.get(house.at("webhooks")).content.decode()
    assert f'<a href="{place}">' in page
    assert f'action="{place}"' not in page
    asked = owner.get(place).content.decode()
    assert "Remove https://aurora.example/hook?a=1?" in asked
    assert "its deliveries: 1, of which 1 are on their way and will not arrive" in asked
    assert Delivery.objects.count() == 1
    owner.post(place)
    assert not Endpoint.objects.exists()
    foreign = House("nova").endpoint
    for one in (house.endpoint.id, foreign.id, "-" * 36):
        assert owner.get(house.at(f"webhooks/{one}/remove")).status_code == 404
    for deed in ("rotate", "off", "on"):
        assert owner.get(house.at(f"webhooks/{foreign.id}/{deed}")).status_code == 405


def test_what_happened_before_an_endpoint_was_there_is_not_told(house: House) -> None:
    house.batch("completed", completed_at=timezone.now() - timedelta(hours=1))
    tasks.announce(timezone.now())
    assert not Delivery.objects.exists()


def test_a_deaf_receiver_is_tried_with_growing_pauses_and_then_given_up(house: House) -> None:
    house.batch("completed")
    receiver, now, pauses = Receiver(*[500] * 20), timezone.now(), []
    tasks.announce(now)
    for _ in range(20):
        tasks.deliver(now, receiver)
        one = Delivery.objects.get()
        if one.state == "dead":
            break
        assert tasks.deliver(one.next_at - timedelta(seconds=1), receiver) == 0
        pauses.append((one.next_at - now).total_seconds())
        now = one.next_at
    assert pauses == list(tasks.BACKOFF_S)
    assert len(receiver.sent) == len(pauses) + 1
    assert sum(pauses) <= 86_400
    assert len({headers["webhook-id"] for _, _, headers in receiver.sent}) == 1


def test_a_receiver_that_is_gone_is_not_asked_again(house: House) -> None:
    house.batch("completed")
    tasks.announce(timezone.now())
    tasks.deliver(timezone.now(), Receiver(410))
    assert Delivery.objects.get().state == "dead"


def test_a_try_that_dies_with_its_process_is_made_again(house: House) -> None:
    def dies(*given: Any) -> Outcome:
        raise KeyboardInterrupt

    house.batch("completed")
    now = timezone.now()
    tasks.announce(now)
    with pytest.raises(KeyboardInterrupt):
        tasks.deliver(now, dies)
    receiver = Receiver()
    assert tasks.deliver(now, receiver) == 0
    assert tasks.deliver(now + tasks.LEASE, receiver) == 1
    assert Delivery.objects.get().state == "delivered"


def test_what_was_given_up_is_sent_once_more_from_the_page(house: House) -> None:
    house.batch("completed")
    tasks.announce(timezone.now())
    tasks.deliver(timezone.now(), Receiver(410))
    client, one = house.person(Role.DEVELOPER), Delivery.objects.get()
    client.post(house.at(f"deliveries/{one.id}/replay"))
    receiver = Receiver()
    tasks.deliver(timezone.now(), receiver)
    assert Delivery.objects.get().state == "delivered"
    assert receiver.sent[0][2]["webhook-id"] == f"msg_{one.id.hex}"


def test_after_a_rotation_both_secrets_sign_for_a_day(house: House) -> None:
    client = house.person(Role.DEVELOPER)
    client.post(house.at(f"webhooks/{house.endpoint.id}/rotate"))
    house.batch("completed")
    receiver, now = Receiver(500), timezone.now()
    tasks.announce(now)
    tasks.deliver(now, receiver)
    tasks.deliver(now + timedelta(days=2), receiver)
    first, second = (headers["webhook-signature"].split() for _, _, headers in receiver.sent)
    assert (len(first), len(second)) == (2, 1)
    _, body, headers = receiver.sent[0]
    given = (headers["webhook-id"], int(headers["webhook-timestamp"]), body)
    assert first == [signature(secret_of(house.endpoint.id, number), *given) for number in (2, 1)]


def test_what_is_switched_off_is_told_nothing_until_it_is_on(house: House) -> None:
    client, receiver = house.person(Role.DEVELOPER), Receiver()
    client.post(house.at(f"webhooks/{house.endpoint.id}/off"))
    house.batch("completed")
    tasks.announce(timezone.now())
    assert not Delivery.objects.exists()
    client.post(house.at(f"webhooks/{house.endpoint.id}/on"))
    tasks.announce(timezone.now())
    assert tasks.deliver(timezone.now(), receiver) == 1
    client.post(house.at(f"webhooks/{house.endpoint.id}/remove"))
    assert not Endpoint.objects.exists()


def test_the_page_is_for_who_manages_webhooks_and_the_trail_holds_no_secret(house: House) -> None:
    for role in Role:
        allowed, client = may(role, Capability.MANAGE_WEBHOOKS), house.person(role)
        assert client.get(house.at("webhooks")).status_code == (200 if allowed else 403)
        form = {"url": URL, "events": ["batch.failed"], "made_id": uuid.uuid4()}
        assert client.post(house.at("webhooks"), form).status_code == (302 if allowed else 403)
        assert (secret_of(house.endpoint.id, 1) in client.get(house.at("webhooks")).content.decode()) is allowed
    secrets = [secret_of(one.id, 1) for one in Endpoint.objects.all()]
    trail = str(list(AuditEvent.objects.filter(object_type="endpoint").values_list("after", flat=True)))
    assert trail
    assert not any(secret in trail for secret in secrets)


def test_what_is_another_tenants_is_not_there(house: House) -> None:  # P47
    nova = House("nova")
    nova.batch("completed")
    tasks.announce(timezone.now())
    tasks.deliver(timezone.now(), Receiver(410))
    client = house.person(Role.OWNER)
    for deed in ("rotate", "off", "remove"):
        client.post(house.at(f"webhooks/{nova.endpoint.id}/{deed}"))
        client.post(house.at(f"webhooks/{'-' * 36}/{deed}"))
    client.post(house.at(f"deliveries/{Delivery.objects.get().id}/replay"))
    standing = Endpoint.objects.get(id=nova.endpoint.id)
    assert (standing.secret_number, standing.is_active) == (1, True)
    assert Delivery.objects.get().state == "dead"


@pytest.mark.parametrize(
    "url",
    [
        "http://aurora.example/",
        "ftp://aurora.example/",
        "https://",
        "https://user:pass@aurora.example/",
        "https://127.0.0.1/",
        "https://[::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://10.1.2.3:8443/",
        "https://127.1/",
        "https://2130706433/",
        "https://0x7f.0.0.1/",
        "https://①②⑦.0.0.1/",
        "https://localhost/",
        "https://LOCALHOST./",
        "https://db.localhost/",
        "https://redis/",
        "https://vault.internal:8200/",
        "https://printer.local/",
        "https://a..example/",
        "https://aurora.example:99999/",
        "https://aurora.example/a b",
        "https://aurora.example:0/",
        "https://aurora.example:65536/",
        "nonsense",
    ],
)
def test_an_address_that_must_not_be_called_is_refused_when_it_is_named(house: House, url: str) -> None:
    with pytest.raises(ValidationError):
        webhooks.add(actor="tests", tenant=house.tenant, url=url, events=["key.revoked"])
    with pytest.raises(ForbiddenAddress):
        check_url(url)


@pytest.mark.parametrize(
    "url",
    ["https://aurora.example/", "https://localhost.example/", "https://bücher.example/", "https://93.184.216.34/"],
)
def test_an_address_of_the_open_network_is_taken(url: str) -> None:
    assert check_url(url)[0] == "https"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1%eth0",
        "fc00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "::",
    ],
)
def test_a_name_that_leads_behind_our_walls_is_not_called(address: str) -> None:
    """One good address beside it changes nothing."""
    outcome = post(URL, b"{}", {}, resolve=lambda host, port: ["93.184.216.34", address])
    assert outcome == Outcome(None, NOT_REACHED)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.server.heard.append((self.path, self.headers["host"], self.rfile.read(length)))  # type: ignore[attr-defined]
        self.send_response(302 if self.path == "/moved" else 204)
        self.send_header("location", "/elsewhere")
        self.end_headers()

    def log_message(self, *given: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    server.heard = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_connection_goes_to_the_address_that_was_judged_and_follows_no_redirect(server: Any) -> None:
    def at(path: str) -> Outcome:
        url = f"http://aurora.example:{server.server_port}{path}"
        return post(url, b"{}", {}, may_be_private=True, resolve=lambda host, port: ["127.0.0.1"])

    assert at("/hook") == Outcome(204)
    assert at("/moved") == Outcome(302)
    assert not at("/moved").is_heard
    assert [path for path, _, _ in server.heard] == ["/hook", "/moved", "/moved"]
    assert server.heard[0][1].startswith("aurora.example")


def test_nobody_at_home_is_an_outcome() -> None:
    outcome = post("http://x.example:9/", b"", {}, may_be_private=True, resolve=lambda host, port: ["127.0.0.1"])
    assert outcome == Outcome(None, NOT_REACHED)


def test_an_outcome_does_not_tell_which_names_our_network_knows(caplog: pytest.LogCaptureFixture) -> None:
    """The operator's log does."""
    caplog.set_level("INFO", "gateway.webhooks.sending")

    def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    places: list[Any] = [unknown, lambda host, port: ["10.0.0.5"], lambda host, port: []]
    assert {post(URL, b"{}", {}, resolve=place) for place in places} == {Outcome(None, NOT_REACHED)}
    for word in ("Name or service not known", "10.0.0.5 is no public address", "it has no address"):
        assert word in caplog.text


def test_a_receiver_that_trickles_is_cut_off() -> None:
    """Each byte comes in time, and the answer never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            line, _ = listener.accept()
            with line, contextlib.suppress(OSError):
                while True:
                    line.sendall(b"H")
                    time.sleep(0.02)

        thread = threading.Thread(target=trickle)
        thread.start()
        url = f"http://x.example:{listener.getsockname()[1]}/"
        outcome = post(url, b"", {}, may_be_private=True, resolve=lambda host, port: ["127.0.0.1"], timeout_s=0.3)
        thread.join(10)
    assert outcome.status is None
    assert not thread.is_alive()
