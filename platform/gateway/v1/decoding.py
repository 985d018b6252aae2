"""Bytes to a struct of ``schemas``, or the words for what is wrong with them, with the field's name.

Knows msgspec's own words; refuses to know what the fields mean.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn, TypeVar, get_args

import msgspec
from msgspec import Struct

from gateway.errors import Reason, invalid
from gateway.v1.schemas import Tier

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "tool_calls": ([],),
    "annotations": ([],),
    "include": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
    "background": (False,),
    "generate": (True,),
    "reasoning_effort": ("none",),
    "prompt_cache_retention": ("in_memory",),
}
_UNSUPPORTED = (
    *("tools", "tool_choice", "top_logprobs", "prompt_cache_retention", "n", "logprobs", "response_format"),
    *("modalities", "audio", "prediction", "functions", "function_call", "reasoning_effort", "verbosity"),
    *("web_search_options", "moderation", "prompt_cache_options", "tool_calls", "annotations", "text", "truncation"),
    *("include", "background", "conversation", "prompt", "reasoning", "generate", "max_tool_calls"),
    "previous_response_id",
)

Body = TypeVar("Body", bound=Struct)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Raises InvalidRequest with the field's name as ``param``."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        _refuse_field(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = "The body is empty." if not body.strip() else f"The body is not valid JSON: {error}."
        raise invalid(Reason.INVALID_REQUEST, what) from error
    except RecursionError as error:
        raise invalid(Reason.INVALID_REQUEST, "The body is nested too deeply.") from error


def _refuse_field(words: str) -> NoReturn:
    match = _PATH.match(words)
    assert match is not None  # the pattern takes any text
    what, path = match["what"], (match["path"] or "").lstrip(".")
    for pattern, reason, verb in (
        (_UNKNOWN, Reason.UNKNOWN_PARAMETER, "Unknown parameter"),
        (_MISSING, Reason.MISSING_PARAMETER, "Missing required parameter"),
    ):
        if named := pattern.match(what):
            name = f"{path}.{named['name']}" if path else named["name"]
            raise invalid(reason, f"{verb}: {name!r}.", name[:200])
    if not path:
        raise invalid(Reason.INVALID_REQUEST, "The body must be a JSON object.")
    if path == "service_tier" and what.startswith("Invalid enum value"):
        what = f"Must be one of {', '.join(get_args(Tier))}"
    reason = Reason.INVALID_TYPE if ", got `" in what else Reason.INVALID_VALUE
    raise invalid(reason, f"Invalid {path!r}: {what}.", path)


def refuse_unsupported(body: Struct, where: str = "") -> None:
    """Raises InvalidRequest for the first field that asks for something this server does not do; never ignores it."""
    for name in _UNSUPPORTED:
        value = getattr(body, name, None)
        if value is None or any(
            type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ())
        ):
            continue
        param = f"{where}{name}"
        raise invalid(Reason.UNSUPPORTED_PARAMETER, f"{param!r} is not supported here with this value.", param)
