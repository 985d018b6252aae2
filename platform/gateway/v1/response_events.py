"""The events of one response on the websocket, as the OpenAI Responses protocol words and numbers them.

Knows shapes; refuses to know sockets. Numbers are a function of the token index alone: a preamble of four events, one
delta per token (index i is number 4 + i), a tail.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.door import Entered
from gateway.errors import Reason, Refusal
from gateway.v1.schemas import ResponseCreate
from scheduler_engine.events import FinishReason
from wire.messages import Finished

Event = dict[str, Any]


@dataclass(slots=True)
class ResponseEvents:
    """Makes the events in order. Always: numbers have no gap, and the text is the sum of the deltas."""

    request: ResponseCreate
    entered: Entered
    created_at: int
    _number: int = 0
    _opened: bool = False
    _parts: list[str] = field(default_factory=list)

    @property
    def response_id(self) -> str:
        return f"resp_{self.entered.response_id}"

    @property
    def item_id(self) -> str:
        return f"msg_{self.entered.response_id}"

    def begin(self) -> list[bytes]:
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
        ]

    def deltas(self, texts: list[str]) -> list[bytes]:
        """One event per token, the first after the item and its part were announced."""
        events = self._open() if texts else []
        for text in texts:
            self._parts.append(text)
            events.append(self._event("response.output_text.delta", **self._place, delta=text, logprobs=[]))
        return events

    def finish(self, finished: Finished) -> list[bytes]:
        """The tail of a response that the worker ended in good order: completed, cut by length, or cancelled."""
        match finished.choices[0].reason:
            case FinishReason.STOP:
                status, kind, details = "completed", "response.completed", None
            case FinishReason.LENGTH:
                status, kind, details = "incomplete", "response.incomplete", {"reason": "max_output_tokens"}
            case _:
                status, kind, details = "cancelled", "response.incomplete", None
        item_status = "completed" if status == "completed" else "incomplete"
        part = self._part()
        item = self._item(item_status)
        response = self._response(status, output=[item], incomplete_details=details, usage=usage(finished))
        return [
            *self._open(),
            self._event("response.output_text.done", **self._place, text=part["text"], logprobs=[]),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(kind, response=response),
        ]

    def fail(self, refusal: Refusal) -> list[bytes]:
        """The tail of a response that will not go on."""
        code = "rate_limit_exceeded" if refusal.status == 429 else "server_error"
        error = {"code": code, "message": refusal.message, "type": refusal.row.error_type, "headers": refusal.headers()}
        output = [self._item("incomplete")] if self._parts else []
        return [self._event("response.failed", response=self._response("failed", output=output, error=error))]

    @property
    def _place(self) -> Event:
        return {"item_id": self.item_id, "output_index": 0, "content_index": 0}

    def _open(self) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        item = {"id": self.item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=part),
        ]

    def _part(self) -> Event:
        return {"type": "output_text", "text": "".join(self._parts), "annotations": [], "logprobs": []}

    def _item(self, status: str) -> Event:
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": [self._part()]}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        if self.request.stream_id is not None:
            event["stream_id"] = self.request.stream_id
        self._number += 1
        return msgspec.json.encode(event)

    def _response(self, status: str, **changes: Any) -> Event:
        request = self.request
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": self.entered.max_tokens,
            "metadata": request.metadata or {},
            "model": self.entered.text.model,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "service_tier": self.entered.service_tier,
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            **changes,
        }


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


def ends_in_good_order(finished: Finished) -> bool:
    return finished.choices[0].reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)


NOT_FOUND = Refusal(reason=Reason.RESPONSE_NOT_FOUND, message="No response of this id is running on this socket.")
