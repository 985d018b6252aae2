"""Which endpoints a batch may address, and a request's shape checked by the endpoint itself.

The check runs the endpoint's own handler up to the door and stops it there, so a line is judged by the same code as a
request. Refuses to know limits, workers and what is answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta, Struct

from gateway.asking import Ask
from gateway.auth import Caller
from gateway.door import Entered
from gateway.errors import Reason, invalid
from gateway.text import Text
from gateway.v1 import chat, completions, responses_http
from gateway.v1.decoding import decode
from gateway.v1.http import Exchange
from gateway.v1.routes import Call, Handler
from scheduler_engine.policy import PriorityClass

MAX_CUSTOM_ID = 512
NOBODY = Caller("", "", "", "", PriorityClass.BATCH)
_TIERS = (None, "auto", "flex")


HANDLERS: Mapping[str, Handler] = {  # one for each of services.ENDPOINTS
    "/v1/chat/completions": chat.create,
    "/v1/completions": completions.create,
    "/v1/responses": responses_http.create,
}


class InputLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: str
    url: str
    body: msgspec.Raw


class _Common(Struct, frozen=True):
    """What a batch has to say to a body of any endpoint."""

    stream: Any = None
    background: Any = None
    store: Any = None
    service_tier: Any = None
    prompt: Any = None


_line_decoder = msgspec.json.Decoder(InputLine)
_common_decoder = msgspec.json.Decoder(_Common)


class _Reached(Exception):
    """The request has come to the door: its shape is right."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask


class _CheckingDoor:
    """Always: lets nobody in."""

    texts: Mapping[str, Text] = {}

    async def enter(self, caller: Caller, asks: Sequence[Ask], keep: object = None) -> NoReturn:
        [ask] = asks
        raise _Reached(ask)

    def leave(self, entered: Entered) -> None:
        raise AssertionError("nobody was let in")


@dataclass(frozen=True, slots=True)
class _CheckingRuntime:
    """As much of a runtime as a handler uses before the door."""

    door: _CheckingDoor
    body_limit_bytes: int


async def _no_socket(*_: object) -> Any:
    raise AssertionError("a check reads nothing and answers nothing")


_SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "", "headers": [], "query_string": b""}


def read_line(raw: bytes) -> InputLine:
    """Raises InvalidRequest with the field's name."""
    return decode(_line_decoder, raw)


def check(endpoint: str, line: InputLine) -> Ask:
    """What the line asks for. Raises InvalidRequest in the endpoint's own words."""
    if line.method != "POST":
        raise invalid(Reason.INVALID_VALUE, "'method' must be 'POST'.", "method")
    if line.url != endpoint:
        raise invalid(Reason.INVALID_VALUE, f"'url' must be the batch's endpoint, {endpoint!r}.", "url")
    body = bytes(line.body)
    common = decode(_common_decoder, body)
    for name in ("stream", "background", "store"):
        if getattr(common, name):
            raise invalid(Reason.UNSUPPORTED_PARAMETER, f"'{name}' has no meaning in a batch.", name)
    if common.service_tier not in _TIERS:
        raise invalid(Reason.UNSUPPORTED_PARAMETER, "A batch is served and priced as tier 'flex'.", "service_tier")
    if isinstance(common.prompt, list) and len(common.prompt) > 1 and not isinstance(common.prompt[0], int):
        raise invalid(Reason.UNSUPPORTED_PARAMETER, "A line of a batch has one prompt.", "prompt")
    runtime: Any = _CheckingRuntime(_CheckingDoor(), len(body))
    exchange = Exchange(_SCOPE, _no_socket, _no_socket)
    exchange.hand_in(body)
    handling = HANDLERS[endpoint](Call(exchange, runtime, NOBODY, ()))
    try:
        handling.__await__().send(None)
    except _Reached as reached:
        return reached.ask
    raise AssertionError("a handler waited, or ended, before the door")
