"""Bytes on the wire: whatever comes in, nothing is raised and good neighbours survive."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy, gpu_classes
from wire import codec
from wire.bus import BadEntry
from wire.messages import (
    Accepted,
    Attach,
    Cancel,
    ChoiceEnd,
    ChoiceFinished,
    Drain,
    EngineCounters,
    Explain,
    Explained,
    Finished,
    Moved,
    PolicyChanged,
    Rejected,
    Released,
    Reserved,
    SamplingParameters,
    TokenLogprob,
    Tokens,
)


def every_kind(make: Any) -> list[Any]:
    tenant = TenantClassPolicy(tenant_id="aurora", priority_class=PriorityClass.BATCH, concurrency=3)
    logprob = TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5), (6, -1.0)))
    return [
        make.submit(
            sampling=SamplingParameters(seed=7, logit_bias=((3, 1.5),)),
            stop_strings=(b"\xff\x00",),
            delivered_token_ids=((1, 2), ()),
        ),
        Cancel(response_id="r", attempt=1, reason="client"),
        Attach(response_id="r", attempt=1, gateway_id="g2", from_index=3),
        PolicyChanged(snapshot=PolicySnapshot(version=4, classes=gpu_classes(), tenants=(tenant,))),
        Drain(worker_epoch=3, actor="ops"),
        Explain(gateway_id="g1", response_id="r"),
        Explained(
            response_id="r",
            choice=0,
            is_known=True,
            waits=(("queued", "for a slot", 5),),
            timeline=((0, "let in"),),
        ),
        Accepted(response_id="r", attempt=1, position=2, estimated_start_us=5_000),
        Rejected(response_id="r", attempt=1, reason="late", retry_after_us=None),
        Tokens(
            worker_id="w",
            epoch=3,
            step=9,
            response_ids=("r",),
            attempts=(1,),
            choices=(0,),
            first_indexes=(4,),
            token_ids=((5, 6),),
            logprobs=((logprob, logprob),),
        ),
        ChoiceFinished(response_id="r", attempt=1, end=ChoiceEnd(choice=1, reason="length")),
        Moved(response_id="r", gateway_id="g2"),
        Finished(
            response_id="r",
            attempt=1,
            choices=(ChoiceEnd(choice=0, reason="stop", visible_bytes=12),),
            prompt_tokens=3,
            cached_tokens=0,
            output_tokens=2,
            counters=EngineCounters(ttft_us=40_000),
        ),
        Reserved(
            response_id="r",
            tenant_id="aurora",
            project_id="p",
            key_id="k",
            priority_class=PriorityClass.DEFAULT,
            model="toy",
            source="sse",
            money_micros=9,
            reserved_tokens=100,
            window_id="2026-11",
            policy_version=1,
            price_version=2,
        ),
        make.usage(),
        Released(response_id="r", tenant_id="aurora", reason="gave up"),
        make.load(),
    ]


def test_every_message_comes_back_equal(make: Any) -> None:
    messages = every_kind(make)
    assert {type(message).__name__ for message in messages} == set(codec._DECODERS)
    assert codec.decode(codec.encode(messages), "1") == messages


def test_a_newer_version_is_a_bad_entry_that_names_both_versions(make: Any) -> None:
    body = bytes([9]) + codec.encode([make.submit()])[1:]
    (entry,) = codec.decode(body, "7-0")
    assert entry == BadEntry("7-0", "version 9, this process speaks 1")


def test_an_unknown_kind_leaves_its_neighbours_alone(make: Any) -> None:
    submit = make.submit()
    items = [("Hologram", {"x": 1}), ("Submit", submit), ("Cancel", {"response_id": 7})]
    unknown, good, wrong_type = codec.decode(b"\x01" + msgspec.msgpack.encode(items), "1")
    assert good == submit
    assert isinstance(unknown, BadEntry)
    assert "Hologram" in unknown.reason
    assert isinstance(wrong_type, BadEntry)
    assert wrong_type.reason.startswith("Cancel:")


def test_a_field_from_a_later_release_is_ignored() -> None:
    body = b"\x01" + msgspec.msgpack.encode(
        [("Cancel", {"response_id": "r", "attempt": 1, "reason": "client", "colour": "red"})]
    )
    assert codec.decode(body, "1") == [Cancel(response_id="r", attempt=1, reason="client")]


@given(st.binary(max_size=200))
def test_garbage_never_raises(body: bytes) -> None:
    for entry in codec.decode(b"\x01" + body, "1") + codec.decode(body, "1"):
        assert isinstance(entry, BadEntry)


@given(st.data())
def test_damaged_entries_never_raise(data: st.DataObject) -> None:
    good = Cancel(response_id="r", attempt=1, reason="client")
    body = bytearray(codec.encode([good, good, good]))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assert all(isinstance(entry, BadEntry | Cancel) for entry in codec.decode(bytes(body), "1"))


def test_a_finished_output_comes_back_and_a_foreign_one_is_unknown(make: Any) -> None:
    output = make.output([[1, 2], [3]])
    body = codec.encode_output(output)
    assert codec.decode_output(body) == output
    assert codec.decode_output(b"\x02" + body[1:]) is None
    assert codec.decode_output(b"\x01\xc1") is None
