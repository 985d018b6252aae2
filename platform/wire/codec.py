"""Messages to bytes and back. One entry = a version byte, then a msgpack array of [kind, message].

Whatever cannot be understood (garbage, a newer version, an unknown kind, a wrong type) is a BadEntry, no exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from wire.bus import BadEntry, FinishedOutput
from wire.messages import PROTOCOL_VERSION, LoadSnapshot, Message

_DECODERS: dict[str, msgspec.msgpack.Decoder[Message]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Message)
}
_VERSION = bytes([PROTOCOL_VERSION])
_encoder = msgspec.msgpack.Encoder()
_entry_decoder = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
_output_decoder = msgspec.msgpack.Decoder(FinishedOutput)


def encode(messages: Sequence[Message]) -> bytes:
    """The body of one stream entry."""
    return _VERSION + _encoder.encode([(type(message).__name__, message) for message in messages])


def decode(body: bytes, entry_id: str) -> list[Message | BadEntry]:
    """The messages of one entry, in order. A message that is not understood becomes a BadEntry; its neighbours stay."""
    if not body:
        return [BadEntry(entry_id, "empty entry")]
    if body[0] != PROTOCOL_VERSION:
        return [BadEntry(entry_id, f"version {body[0]}, this process speaks {PROTOCOL_VERSION}")]
    try:
        items = _entry_decoder.decode(body[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return [BadEntry(entry_id, f"not an entry: {error}")]
    return [_decode_one(kind, raw, entry_id) for kind, raw in items]


def _decode_one(kind: str, raw: msgspec.Raw, entry_id: str) -> Message | BadEntry:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        return BadEntry(entry_id, f"unknown kind {kind!r}")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BadEntry(entry_id, f"{kind}: {error}")


def encode_load(load: LoadSnapshot) -> bytes:
    """The value of a worker's load key."""
    return encode([load])


def decode_load(body: bytes) -> LoadSnapshot | None:
    """None when the snapshot is not understood: such a worker counts as absent."""
    match decode(body, "load"):
        case [LoadSnapshot() as load]:
            return load
        case _:
            return None


def encode_output(output: FinishedOutput) -> bytes:
    """The value of an output key."""
    return _VERSION + _encoder.encode(output)


def decode_output(body: bytes) -> FinishedOutput | None:
    """None when the stored output is not understood."""
    if body[:1] != _VERSION:
        return None
    try:
        return _output_decoder.decode(body[1:])
    except msgspec.DecodeError:
        return None
