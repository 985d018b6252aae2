"""What a line of the log carries: who it is about, as plain lines or as one JSON object each.

Knows names that are bound to the request under way; refuses to let a key or a link out. Texts of prompts and answers
are never handed to a logger in the first place.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from pythonjsonlogger.json import JsonFormatter

_SECRETS = (
    (re.compile(r"\bsk_[A-Za-z0-9]+_[A-Za-z0-9_-]+"), "sk_…"),
    (re.compile(r"(/invitation/|/password/reset/key/)[^\s/'\"]+"), r"\1…"),
)
_bound: ContextVar[Mapping[str, str]] = ContextVar("log_bound", default={})  # noqa: B039 - never changed in place

requests = logging.getLogger("gateway.requests")


def bind(**names: str) -> None:
    """From here on, lines of this task carry these names too."""
    _bound.set({**_bound.get(), **names})


class Bound(logging.Filter):
    """Puts what is bound on each record. Always: lets every record through."""

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in _bound.get().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


class WithoutCallersTracebacks(logging.Filter):
    """A caller's mistake, answered below 500, is a line and no traceback. Always: lets every record through."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "status_code", 500) < 500:
            record.exc_info = record.exc_text = None
        return True


def _without_secrets(line: str) -> str:
    for secret, shown in _SECRETS:
        line = secret.sub(shown, line)
    return line


class LineFormatter(logging.Formatter):
    """A plain line. Always: without anything that looks like a key, or a link that opens."""

    def format(self, record: logging.LogRecord) -> str:
        return _without_secrets(super().format(record))


class JsonLines(JsonFormatter):
    """One JSON object a line: time, level, logger, message, and whatever is bound or given as ``extra``.

    Always: without anything that looks like a key, or a link that opens.
    """

    def __init__(self) -> None:
        super().__init__(
            "{asctime}{levelname}{name}{message}",
            style="{",
            datefmt="%Y-%m-%dT%H:%M:%S%z",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "priority_class": "class"},
        )

    def format(self, record: logging.LogRecord) -> str:
        return _without_secrets(super().format(record))


def configuration(*, is_json: bool, level: str) -> dict[str, Any]:
    """For Django's LOGGING. A line for each answer on /v1 only as JSON: among plain lines it would bury the others."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {
            "bound": {"()": "gateway.logs.Bound"},
            "without_callers_tracebacks": {"()": "gateway.logs.WithoutCallersTracebacks"},
        },
        "formatters": {
            "line": {"()": "gateway.logs.LineFormatter", "format": "{levelname} {name}: {message}", "style": "{"},
            "json": {"()": "gateway.logs.JsonLines"},
        },
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "json" if is_json else "line",
                "filters": ["bound", "without_callers_tracebacks"],
            }
        },
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            # A wrong Host header is anybody's to send: answered 400, and not worth a traceback in the log.
            "django.security.DisallowedHost": {"level": "CRITICAL", "propagate": False},
            "gateway.requests": {"level": "INFO" if is_json else "WARNING"},
        },
    }
