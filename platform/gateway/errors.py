"""One table: why a request is refused -> HTTP status, OpenAI error type and code, and whether coming back helps.

Knows the OpenAI error shape; refuses to know which door (HTTP, SSE, websocket) shows it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from scheduler_engine.events import RejectReason
from scheduler_engine.policy import PriorityClass

MAX_RETRY_AFTER_US = 120_000_000  # the official client does not come back at all when told more


class Retry(enum.Enum):
    """What the caller is told about coming back."""

    SILENT = "silent"  # the status says it (400, 404, ...)
    NEVER = "never"  # x-should-retry: false
    LATER = "later"  # Retry-After, one second when nothing better is known


class Reason(enum.StrEnum):
    """Every way in which the door says no."""

    # the caller
    NO_KEY = "no_key"
    INVALID_KEY = "invalid_key"
    KEY_IN_QUERY = "key_in_query"
    CLASS_NOT_ALLOWED = "class_not_allowed"
    # the request
    INVALID_REQUEST = "invalid_request"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    MISSING_PARAMETER = "missing_parameter"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TOO_SLOW = "body_too_slow"
    CONTEXT_LENGTH = "context_length"
    MODEL_NOT_FOUND = "model_not_found"
    RESPONSE_NOT_FOUND = "response_not_found"
    FILE_NOT_FOUND = "file_not_found"
    BATCH_NOT_FOUND = "batch_not_found"
    WRONG_STATE = "wrong_state"
    ROUTE_NOT_FOUND = "route_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    KEY_REUSED = "key_reused"  # the same Idempotency-Key, another body
    TWIN_RUNNING = "twin_running"  # the same Idempotency-Key and body, still under way
    KEY_SPENT = "key_spent"  # its operation was charged, and its answer was lost with the gateway that had it
    NOT_CANCELLABLE = "not_cancellable"
    MOVED = "moved"  # the stream is read elsewhere
    # the tenant's own limits
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENCY = "concurrency"
    MONEY = "money"
    NEVER_WITHIN_LIMIT = "never_within_limit"
    TOO_MANY_LANES = "too_many_lanes"
    TOO_MANY_FRAMES = "too_many_frames"
    TOO_MANY_SOCKETS = "too_many_sockets"
    TOO_MANY_CALLS = "too_many_calls"  # to files and batches
    OPEN_BATCHES = "open_batches"
    STORAGE_QUOTA = "storage_quota"
    # the platform
    CAPACITY = "capacity"  # the batch class has none to spare
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    QUEUE_WAIT = "queue_wait"
    NO_WORKER = "no_worker"
    UNAVAILABLE = "unavailable"
    PERHAPS_DONE = "perhaps_done"  # the database was lost before it had said whether it did it
    STORAGE_FULL = "storage_full"
    WORKER_LOST = "worker_lost"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Row:
    status: int
    error_type: str
    code: str
    retry: Retry


_INVALID = "invalid_request_error"
_TABLE: dict[Reason, Row] = {
    Reason.NO_KEY: Row(401, "authentication_error", "invalid_api_key", Retry.SILENT),
    Reason.INVALID_KEY: Row(401, "authentication_error", "invalid_api_key", Retry.SILENT),
    Reason.KEY_IN_QUERY: Row(401, "authentication_error", "invalid_api_key", Retry.SILENT),
    Reason.CLASS_NOT_ALLOWED: Row(403, "permission_error", "service_tier_not_granted", Retry.NEVER),
    Reason.INVALID_REQUEST: Row(400, _INVALID, "invalid_request", Retry.SILENT),
    Reason.INVALID_TYPE: Row(400, _INVALID, "invalid_type", Retry.SILENT),
    Reason.INVALID_VALUE: Row(400, _INVALID, "invalid_value", Retry.SILENT),
    Reason.MISSING_PARAMETER: Row(400, _INVALID, "missing_required_parameter", Retry.SILENT),
    Reason.UNKNOWN_PARAMETER: Row(400, _INVALID, "unknown_parameter", Retry.SILENT),
    Reason.UNSUPPORTED_PARAMETER: Row(400, _INVALID, "unsupported_parameter", Retry.SILENT),
    Reason.UNSUPPORTED_MEDIA_TYPE: Row(415, _INVALID, "unsupported_media_type", Retry.SILENT),
    Reason.BODY_TOO_LARGE: Row(413, _INVALID, "request_too_large", Retry.SILENT),
    Reason.BODY_TOO_SLOW: Row(408, _INVALID, "request_timeout", Retry.SILENT),
    Reason.CONTEXT_LENGTH: Row(400, _INVALID, "context_length_exceeded", Retry.SILENT),
    Reason.MODEL_NOT_FOUND: Row(404, "not_found_error", "model_not_found", Retry.SILENT),
    Reason.RESPONSE_NOT_FOUND: Row(404, "not_found_error", "response_not_found", Retry.SILENT),
    Reason.FILE_NOT_FOUND: Row(404, "not_found_error", "file_not_found", Retry.SILENT),
    Reason.BATCH_NOT_FOUND: Row(404, "not_found_error", "batch_not_found", Retry.SILENT),
    Reason.WRONG_STATE: Row(409, _INVALID, "wrong_state", Retry.NEVER),
    Reason.ROUTE_NOT_FOUND: Row(404, "not_found_error", "route_not_found", Retry.SILENT),
    Reason.METHOD_NOT_ALLOWED: Row(405, _INVALID, "method_not_allowed", Retry.SILENT),
    Reason.KEY_REUSED: Row(422, _INVALID, "idempotency_key_reused", Retry.NEVER),
    Reason.TWIN_RUNNING: Row(409, _INVALID, "idempotency_twin_running", Retry.LATER),
    Reason.KEY_SPENT: Row(409, _INVALID, "idempotency_answer_lost", Retry.NEVER),
    Reason.NOT_CANCELLABLE: Row(409, _INVALID, "response_not_cancellable", Retry.NEVER),
    Reason.MOVED: Row(409, _INVALID, "response_moved", Retry.LATER),
    Reason.REQUESTS_PER_MINUTE: Row(429, "requests", "rate_limit_exceeded", Retry.LATER),
    Reason.TOKENS_PER_MINUTE: Row(429, "tokens", "rate_limit_exceeded", Retry.LATER),
    Reason.CONCURRENCY: Row(429, "rate_limit_error", "rate_limit_exceeded", Retry.LATER),
    Reason.MONEY: Row(429, "insufficient_quota", "insufficient_quota", Retry.NEVER),
    Reason.NEVER_WITHIN_LIMIT: Row(429, "rate_limit_error", "rate_limit_exceeded", Retry.NEVER),
    Reason.TOO_MANY_LANES: Row(429, "rate_limit_error", "websocket_stream_limit_reached", Retry.LATER),
    Reason.TOO_MANY_FRAMES: Row(429, "rate_limit_error", "rate_limit_exceeded", Retry.LATER),
    Reason.TOO_MANY_SOCKETS: Row(429, "rate_limit_error", "websocket_connection_limit_reached", Retry.LATER),
    Reason.TOO_MANY_CALLS: Row(429, "requests", "rate_limit_exceeded", Retry.LATER),
    Reason.OPEN_BATCHES: Row(429, "rate_limit_error", "batch_limit_reached", Retry.NEVER),
    Reason.STORAGE_QUOTA: Row(400, _INVALID, "storage_quota_exceeded", Retry.SILENT),
    Reason.CAPACITY: Row(429, "rate_limit_error", "resource_unavailable", Retry.LATER),
    Reason.OVERLOADED: Row(503, "overloaded", "overloaded", Retry.LATER),
    Reason.DEADLINE: Row(503, "overloaded", "deadline_unreachable", Retry.LATER),
    Reason.QUEUE_WAIT: Row(503, "overloaded", "queue_timeout", Retry.LATER),
    Reason.NO_WORKER: Row(503, "server_error", "no_worker", Retry.LATER),
    Reason.UNAVAILABLE: Row(503, "server_error", "service_unavailable", Retry.LATER),
    Reason.PERHAPS_DONE: Row(503, "server_error", "outcome_unknown", Retry.NEVER),
    Reason.STORAGE_FULL: Row(503, "server_error", "storage_full", Retry.LATER),
    Reason.WORKER_LOST: Row(503, "server_error", "worker_lost", Retry.LATER),
    Reason.CANCELLED: Row(503, "server_error", "cancelled", Retry.NEVER),
    Reason.FAILED: Row(500, "server_error", "generation_failed", Retry.SILENT),
    Reason.INTERNAL: Row(500, "server_error", "internal_error", Retry.SILENT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refusal is a value: why, in words for the caller, and when to come back. Always: free of charge."""

    reason: Reason
    message: str
    param: str | None = None
    retry_after_us: int | None = None

    @property
    def row(self) -> Row:
        return _TABLE[self.reason]

    @property
    def status(self) -> int:
        return self.row.status

    def error(self) -> dict[str, str | None]:
        """The OpenAI error object: always all four keys."""
        return {"message": self.message, "type": self.row.error_type, "param": self.param, "code": self.row.code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error()})

    def headers(self) -> dict[str, str]:
        """Retry headers. ``Retry-After`` is whole seconds (>= 1), ``retry-after-ms`` the exact value. A deadline that
        no wait helps, and a time further away than clients wait, say that coming back by itself is of no use.
        """
        match self.row.retry:
            case Retry.SILENT:
                return {}
            case Retry.NEVER:
                return {"x-should-retry": "false"}
            case Retry.LATER:
                if self.retry_after_us is None and self.reason is Reason.DEADLINE:
                    return {"x-should-retry": "false"}
                delay_us = max(1, self.retry_after_us or 1_000_000)
                told = {"retry-after": str(-(-delay_us // 1_000_000)), "retry-after-ms": str(-(-delay_us // 1_000))}
                return told if delay_us <= MAX_RETRY_AFTER_US else told | {"x-should-retry": "false"}


PERHAPS_DONE = Refusal(
    reason=Reason.PERHAPS_DONE,
    message="The database does not answer. What was asked may have been done: look before you ask for it again.",
)


class InvalidRequest(Exception):
    """A body, header or frame that cannot be served as it is; carries the refusal to answer with."""

    def __init__(
        self,
        refusal: Refusal,
        headers: Mapping[str, str] | None = None,
        priority_class: PriorityClass | None = None,
    ) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.headers = dict(headers or {})
        self.priority_class = priority_class  # once it is known, for the counters


def invalid(reason: Reason, message: str, param: str | None = None) -> InvalidRequest:
    return InvalidRequest(Refusal(reason=reason, message=message, param=param))


_REJECTS: dict[str, tuple[Reason, str]] = {
    RejectReason.NEVER_FITS: (Reason.CONTEXT_LENGTH, "The request needs more cache memory than the device has."),
    RejectReason.CONTEXT_LENGTH: (
        Reason.CONTEXT_LENGTH,
        "Prompt and max_tokens together exceed the model's context length.",
    ),
    RejectReason.LATE: (Reason.DEADLINE, "The deadline cannot be met now; nothing was charged."),
    RejectReason.QUEUE_WAIT: (
        Reason.QUEUE_WAIT,
        "The request waited as long as it was allowed to; nothing was charged.",
    ),
    RejectReason.CLASS_CLOSED: (Reason.OVERLOADED, "Class {label} takes no new work now; nothing was charged."),
    RejectReason.DRAINING: (Reason.OVERLOADED, "The worker is going away; please send the request again."),
    # The door asks the policy first: a worker that still says so knows another one. Coming back, the door has it too.
    RejectReason.NOT_ALLOWED: (Reason.UNAVAILABLE, "The policy has just changed; please send the request again."),
    RejectReason.GRAMMAR: (
        Reason.INVALID_VALUE,
        "The format asked for cannot be compiled into a grammar here; nothing was charged.",
    ),
}


def from_reject(reason: str, priority_class: PriorityClass, retry_after_us: int | None) -> Refusal:
    """What the engine's reject reason means at the door. The batch class is refused with 429 where it is short of
    capacity, the others with 503; a deadline that no capacity would meet is 503 in each.
    """
    kind, words = _REJECTS.get(reason, (Reason.INTERNAL, "The worker refused the request."))
    never = kind is Reason.DEADLINE and retry_after_us is None
    if kind in _SHORT_OF_CAPACITY and priority_class is PriorityClass.BATCH and not never:
        kind = Reason.CAPACITY
    message = words.format(label=priority_class.label)
    return Refusal(reason=kind, message=message, retry_after_us=retry_after_us)


_SHORT_OF_CAPACITY = frozenset({Reason.OVERLOADED, Reason.DEADLINE, Reason.QUEUE_WAIT})


def error_event(refusal: Refusal) -> dict[str, Any]:
    """An error inside a stream that has begun: any ``data:`` object with a top-level ``error`` raises in the client."""
    return {"error": refusal.error()}
