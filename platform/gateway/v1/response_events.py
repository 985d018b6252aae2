"""The events of one response, as the OpenAI Responses protocol words and numbers them, for HTTP and websocket alike.

Knows shapes; refuses to know sockets. Numbers are a function of the token index alone: a preamble of four events, one
delta per token (index i is number 4 + i), a tail. So any gateway makes the same events of the same tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.errors import Reason, Refusal
from gateway.response_stream import Delivery, End
from gateway.text import Text
from gateway.v1.answers import ChoiceText, outcome_of
from gateway.v1.schemas import ResponseCreate
from scheduler_engine.events import FinishReason
from scheduler_engine.policy import PriorityClass
from wire.messages import Finished

Event = dict[str, Any]
GRAMMAR_PARAM = "text.format"  # what a response calls the shape of its text
NOT_FOUND = Refusal(reason=Reason.RESPONSE_NOT_FOUND, message="There is no response of this id.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What stays the same in all events of a response. ``created_at`` in seconds since 1970."""

    response_id: str
    request: ResponseCreate
    text: Text
    created_at: int
    max_tokens: int
    priority_class: PriorityClass
    service_tier: str

    @property
    def name(self) -> str:
        return f"resp_{self.response_id}"

    @property
    def text_format(self) -> Event:
        """As it was asked for, without what was left out."""
        shape = self.request.text
        asked = None if shape is None else shape.format
        if asked is None:
            return {"type": "text"}
        return {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}

    @property
    def item_id(self) -> str:
        return f"msg_{self.response_id}"

    def response(self, status: str, **changes: Any) -> Event:
        request = self.request
        return {
            "id": self.name,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": bool(request.background),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": self.max_tokens,
            "metadata": request.metadata or {},
            "model": self.text.model,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "service_tier": self.service_tier,
            "store": bool(request.store),
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": self.text_format},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            **changes,
        }

    def item(self, status: str, text: str) -> Event:
        content = [output_text(text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def output_text(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


@dataclass(slots=True)
class ResponseEvents:
    """Makes the events in order. Always: numbers have no gap, and the text is the sum of the deltas.

    Events up to number ``starting_after`` are counted and left out.
    """

    head: Head
    starting_after: int = -1
    _number: int = 0
    _opened: bool = False
    _choice: ChoiceText = field(init=False)

    def __post_init__(self) -> None:
        self._choice = ChoiceText.of(self.head.text)

    @property
    def shown(self) -> str:
        return "".join(self._choice.parts)

    def begin(self) -> list[Event]:
        return self._numbered(
            ("response.created", {"response": self.head.response("in_progress")}),
            ("response.in_progress", {"response": self.head.response("in_progress")}),
        )

    def take(self, delivery: Delivery) -> list[Event]:
        """What came since the last time, and the tail once the response has ended."""
        texts = [text for piece in delivery.pieces for text in self._choice.feed(piece)]
        events = self._deltas(texts)
        if delivery.end is None:
            return events
        return events + self._tail(delivery.end)

    def _deltas(self, texts: Sequence[str]) -> list[Event]:
        """One event per token, the first after the item and its part were announced."""
        if not texts:
            return []
        place = self._place
        deltas = (("response.output_text.delta", {**place, "delta": text, "logprobs": []}) for text in texts)
        return [*self._open(), *self._numbered(*deltas)]

    def _tail(self, end: End) -> list[Event]:
        response = final_response(self.head, end, self.shown)
        status = response["status"]
        if status == "failed":
            return self._numbered(("response.failed", {"response": response}))
        (item,) = response["output"]
        return [
            *self._open(),
            *self._numbered(
                ("response.output_text.done", {**self._place, "text": self.shown, "logprobs": []}),
                ("response.content_part.done", {**self._place, "part": output_text(self.shown)}),
                ("response.output_item.done", {"output_index": 0, "item": item}),
                ("response.completed" if status == "completed" else "response.incomplete", {"response": response}),
            ),
        ]

    @property
    def _place(self) -> Event:
        return {"item_id": self.head.item_id, "output_index": 0, "content_index": 0}

    def _open(self) -> list[Event]:
        if self._opened:
            return []
        self._opened = True
        item = {**self.head.item("in_progress", ""), "content": []}
        return self._numbered(
            ("response.output_item.added", {"output_index": 0, "item": item}),
            ("response.content_part.added", {**self._place, "part": output_text("")}),
        )

    def _numbered(self, *events: tuple[str, Event]) -> list[Event]:
        first = self._number
        self._number += len(events)
        return [
            {"type": kind, "sequence_number": number, **fields}
            for number, (kind, fields) in enumerate(events, start=first)
            if number > self.starting_after
        ]


def final_response(head: Head, end: End, text: str) -> Event:
    """The response as it ended: completed, incomplete by length, cancelled on request, or failed."""
    refusal = outcome_of(end, head.priority_class, GRAMMAR_PARAM)
    if isinstance(end, Finished) and (not isinstance(refusal, Refusal) or refusal.reason is Reason.CANCELLED):
        return _ended_well(head, end, text)
    assert isinstance(refusal, Refusal)
    code = "rate_limit_exceeded" if refusal.status == 429 else "server_error"
    error = {"code": code, "message": refusal.message, "type": refusal.row.error_type, "headers": refusal.headers()}
    return head.response("failed", output=[head.item("incomplete", text)] if text else [], error=error)


def _ended_well(head: Head, finished: Finished, text: str) -> Event:
    match finished.choices[0].reason:
        case FinishReason.STOP:
            status, details = "completed", None
        case FinishReason.LENGTH:
            status, details = "incomplete", {"reason": "max_output_tokens"}
        case _:
            status, details = "cancelled", None
    item = head.item("completed" if status == "completed" else "incomplete", text)
    return head.response(status, output=[item], incomplete_details=details, usage=usage(finished))


def usage(finished: Finished) -> Event:
    """The worker's count in the words of this protocol."""
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": finished.prompt_tokens + finished.output_tokens,
    }


def error_frame(refusal: Refusal, headers: dict[str, str], stream_id: str | None) -> bytes:
    """An error outside any response; the socket stays usable."""
    error = {**refusal.error(), "headers": {**headers, **refusal.headers()}}
    event: Event = {"type": "error", "status": refusal.status, "error": error}
    if stream_id is not None:
        event["stream_id"] = stream_id
    return msgspec.json.encode(event)
