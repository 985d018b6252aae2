"""What an ask becomes: its id, its class, its number of tokens."""

from __future__ import annotations

import asyncio
import threading
import uuid

import pytest

from gateway.admission import new_response_id
from gateway.asking import Ask, Chat, effective_max_tokens, encode_prompt, requested_class
from gateway.auth import Caller
from gateway.errors import Reason, Refusal
from gateway.text import Message, byte_text
from scheduler_engine.policy import PriorityClass, TenantClassPolicy

INTERACTIVE, DEFAULT, BATCH = PriorityClass
CALLER = Caller("key", "public", "aurora", "chat", BATCH)


def ask(**changes: object) -> Ask:
    fields = {"model": "m", "prompt": Chat(()), "source": "rest", "received_at_s": 0.0, **changes}
    return Ask(**fields)  # type: ignore[arg-type]


def quota(**limits: int) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id="aurora", priority_class=DEFAULT, **limits)  # type: ignore[arg-type]


def test_response_ids_are_uuid_version_7_and_sort_by_their_moment() -> None:  # P28
    early, late = (new_response_id(now_ms, b"\xff" * 10) for now_ms in (1_800_000_000_000, 1_800_000_000_001))
    assert early < late
    parsed = uuid.UUID(early)
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert parsed.int >> 80 == 1_800_000_000_000


def test_response_ids_of_one_moment_differ_by_their_entropy() -> None:
    assert new_response_id(1, b"a" * 10) != new_response_id(1, b"b" * 10)


@pytest.mark.parametrize(
    ("tier", "expected"),
    [("priority", INTERACTIVE), ("fast", INTERACTIVE), ("default", DEFAULT), ("flex", BATCH)],
)
def test_a_tier_asks_for_its_class(tier: str, expected: PriorityClass) -> None:
    assert requested_class(CALLER, ask(service_tier=tier)) is expected


@pytest.mark.parametrize("tier", [None, "auto"])
def test_without_a_tier_the_projects_own_class_is_asked_for(tier: str | None) -> None:
    assert requested_class(CALLER, ask(service_tier=tier)) is BATCH


@pytest.mark.parametrize(
    ("limits", "prompt", "expected"),
    [
        ({"default_max_tokens": 50}, 10, 50),
        ({"default_max_tokens": 50, "max_tokens_cap": 20}, 10, 20),
        ({"default_max_tokens": 500}, 90, 10),  # what the context leaves
    ],
)
def test_an_absent_max_tokens_is_the_default_within_cap_and_context(
    limits: dict[str, int], prompt: int, expected: int
) -> None:
    assert effective_max_tokens(ask(), quota(**limits), prompt, 100) == expected


def test_a_wish_is_never_cut_in_silence() -> None:
    over_context = effective_max_tokens(ask(max_tokens=91), quota(), 10, 100)
    over_cap = effective_max_tokens(ask(max_tokens=21), quota(max_tokens_cap=20), 10, 100)
    assert isinstance(over_context, Refusal)
    assert isinstance(over_cap, Refusal)
    assert (over_context.reason, over_cap.reason) == (Reason.CONTEXT_LENGTH, Reason.INVALID_VALUE)
    assert effective_max_tokens(ask(max_tokens=90), quota(), 10, 100) == 90


async def test_a_prompt_leaves_room_for_one_token_at_least() -> None:
    text = byte_text()
    length = len(text.chat_prompt([Message("user", "Hi")]))
    assert isinstance(await encode_prompt(text, ask(prompt=Chat((Message("user", "Hi"),))), length), Refusal)
    assert isinstance(await encode_prompt(text, ask(prompt=Chat((Message("user", "Hi"),))), length + 1), tuple)


async def test_a_long_prompt_is_encoded_aside_to_the_same_tokens() -> None:
    text, messages = byte_text(), (Message("user", "x" * 20_000),)
    assert await encode_prompt(text, ask(prompt=Chat(messages)), 30_000) == text.chat_prompt(messages)


async def test_a_chat_of_some_hundred_words_is_encoded_while_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    text, loop_went_on = byte_text(), threading.Event()
    monkeypatch.setattr(text, "chat_prompt", lambda _: (1,) if loop_went_on.wait(5) else ())
    prompt = Chat((Message("user", "a word or two " * 200),))
    encoding = asyncio.create_task(encode_prompt(text, ask(prompt=prompt), 32_768))
    await asyncio.sleep(0)
    loop_went_on.set()
    assert await encoding == (1,)
