"""Bytes to a struct of ``schemas``, or the words for what is wrong with them, with the field's name.

Knows msgspec's own words; refuses to know what the fields mean.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NoReturn, TypeVar, get_args

import msgspec
from msgspec import Struct

from gateway.errors import Reason, invalid
from gateway.v1.schemas import Tier

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "tool_calls": ([],),
    "annotations": ([],),
    "include": ([],),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "generate": (True,),
    "reasoning_effort": ("none",),
    "prompt_cache_retention": ("in_memory",),
}
_UNSUPPORTED = (
    *("tools", "tool_choice", "prompt_cache_retention", "best_of", "suffix", "top_logprobs"),
    *("modalities", "audio", "prediction", "functions", "function_call", "reasoning_effort", "verbosity"),
    *("web_search_options", "moderation", "prompt_cache_options", "tool_calls", "annotations", "truncation"),
    *("include", "conversation", "prompt", "reasoning", "generate", "max_tool_calls"),
    "previous_response_id",
)

MAX_QUOTED = 200
Body = TypeVar("Body", bound=Struct)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_SOMEWHERE = "[...]"  # msgspec's path to a value of an object, and of a list whose kind it finds out by reading it
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Raises InvalidRequest with the field's name as ``param``. Of a member that stands twice the last one counts: to
    find the second takes longer than all of the decoding.
    """
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
            name = _shown(f"{path}.{named['name']}" if path else named["name"])
            raise invalid(reason, f"{verb}: {name!r}.", name)
    if not path:
        raise invalid(Reason.INVALID_REQUEST, "The body must be a JSON object.")
    if path == "service_tier" and what.startswith("Invalid enum value"):
        what = f"Must be one of {', '.join(get_args(Tier))}"
    if match["key"]:
        what = f"a name in it: {what}"
    path, is_inside, _ = path.partition(_SOMEWHERE)
    if is_inside:
        what = f"a value in it: {what}"
    reason = Reason.INVALID_TYPE if ", got `" in what else Reason.INVALID_VALUE
    path = _shown(path)
    raise invalid(reason, f"Invalid {path!r}: {_shown(what)}.", path)


def _shown(words: str) -> str:
    """What a caller wrote is quoted back only so far."""
    return words if len(words) <= MAX_QUOTED else words[: MAX_QUOTED - 1] + "…"


@cache
def _unsupported_of(kind: type[Struct]) -> tuple[str, ...]:
    """Fields that are taken as they come, so that they can be refused by name."""
    untyped = {field.name for field in msgspec.structs.fields(kind) if field.type is Any}
    return tuple(name for name in _UNSUPPORTED if name in untyped)


def refuse_unsupported(body: Struct, where: str = "") -> None:
    """Raises InvalidRequest for the first field that asks for something this server does not do; never ignores it."""
    for name in _unsupported_of(type(body)):
        value = getattr(body, name)
        if value is None or any(
            type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ())
        ):
            continue
        param = f"{where}{name}"
        raise invalid(Reason.UNSUPPORTED_PARAMETER, f"{param!r} is not supported here with this value.", param)
