"""The engine's state as bytes, without a single token id, and back.

A pickle of the engine's own objects; reading one back makes nothing but those, whatever the bytes say. Only the source
that wrote a checkpoint can read it (``fingerprint``): its state has no other definition.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import scheduler_engine
from scheduler_engine.live import LiveRequest
from scheduler_engine.plan import DecodingSequence
from scheduler_engine.request import Request
from scheduler_engine.running import RunningSet
from scheduler_engine.scheduler import Scheduler
from scheduler_engine.seats import NO_BATCH, Seats

_PLAIN = {
    "builtins": frozenset({"set", "frozenset", "range", "bytearray", "list", "dict", "tuple"}),
    "collections": frozenset({"OrderedDict", "deque", "defaultdict", "Counter"}),
    "copyreg": frozenset({"__newobj__"}),
    __name__: frozenset({"_same"}),
}


class CheckpointError(Exception):
    """Bytes that are no checkpoint of this engine."""


def fingerprint() -> str:
    """Of the engine's source, file by file: equal engines decide alike."""
    digest = blake2b(digest_size=8)
    for path in sorted(Path(scheduler_engine.__path__[0]).rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


class _WithoutTokens(pickle.Pickler):
    """Lengths stay, token ids and stop tokens go: an end that a token brought is recorded as such."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):  # by value: early Pythons 3.11 would name ``getattr``, which no reader may call
            return type(value), (value.value,)
        if type(value) is Request:
            if isinstance(value.prompt_token_ids, range) and not value.stop_token_ids and value.sampling is None:
                return NotImplemented
            return _same, (without_tokens(value),)
        if type(value) not in (LiveRequest, Seats, RunningSet):
            return NotImplemented
        reduced: Any = value.__reduce_ex__(4)
        if type(value) is LiveRequest:
            function, arguments, (nothing, slots), *rest = reduced
            return (function, arguments, (nothing, slots | _bare(value, slots)), *rest)
        function, arguments, attributes, *rest = reduced
        made_anew = (
            {"stop_ids": {}, "_batch": None}
            if type(value) is Seats
            else {"_batches": [], "_batch": NO_BATCH, "_batch_of": None}
        )
        return (function, arguments, attributes | made_anew, *rest)


def _same(request: Request) -> Request:
    return request


def _bare(live: LiveRequest, slots: dict[str, Any]) -> dict[str, Any]:
    output_ids = [0] * len(live.output_ids)
    bare: dict[str, Any] = {"output_ids": output_ids, "stop_ids": frozenset(), "sampling": None}
    if "sequence" in slots:  # the engine appends to the one list, whoever holds it
        sequence: DecodingSequence = slots["sequence"]
        prompt = range(len(sequence.prompt_token_ids))
        bare["sequence"] = sequence._replace(prompt_token_ids=prompt, output_ids=output_ids, sampling=None)
    return bare


def without_tokens(request: Request) -> Request:
    """The same request with made-up token ids."""
    return replace(
        request,
        prompt_token_ids=range(len(request.prompt_token_ids)),
        delivered_token_ids=(0,) * len(request.delivered_token_ids),
        stop_token_ids=(),
        sampling=None,
    )


def save(engine: Scheduler, *, but: frozenset[str] = frozenset()) -> bytes:
    """Between two steps. ``but``: attributes that a subclass added."""
    buffer = io.BytesIO()
    _WithoutTokens(buffer, protocol=5).dump({name: value for name, value in vars(engine).items() if name not in but})
    return buffer.getvalue()


def load(body: bytes) -> Scheduler:
    """The engine that ``save`` was given. Raises CheckpointError."""
    try:
        attributes = _OnlyTheEngine(io.BytesIO(body)).load()
    except CheckpointError:
        raise
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"it cannot be read: {error}") from error
    if not isinstance(attributes, dict):
        raise CheckpointError("it holds no engine")
    engine = Scheduler.__new__(Scheduler)
    vars(engine).update(attributes)
    return engine


class _OnlyTheEngine(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("scheduler_engine.") or name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"it names {module}.{name}, which is no part of an engine")
