"""Whether a JSON schema has a value at all that can be written to its end: one that needs itself has none; and how
wide its objects are.

Knows what leads from a schema to another; refuses to know what else makes a schema wrong: its compiler says that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

MAX_PASSES: Final = 16  # over all references, forwards and backwards in turn: a chain in either order takes two
_ONE_OF: Final = ("anyOf", "oneOf")


def has_no_finite_value(schema: dict[str, Any]) -> bool:
    """True only where this is certain. Raises RecursionError where the schema is nested too deeply."""
    references = list(dict.fromkeys(_references(schema)))
    finite = {reference for reference in references if _at(schema, reference) is None}  # the compiler's to judge
    for number in range(MAX_PASSES):
        num_before = len(finite)
        for reference in reversed(references) if number % 2 else references:
            if reference not in finite and _is_finite(_at(schema, reference), finite):
                finite.add(reference)
        if len(finite) == num_before:
            return not _is_finite(schema, finite)
    return False


def most_properties(schema: Any) -> int:
    """Of any one object in it. Raises RecursionError where it is nested too deeply."""
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    own = schema.get("properties") if isinstance(schema, dict) else None
    return max([len(own) if isinstance(own, dict) else 0, *map(most_properties, parts)])


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Whether a value needs only references of which one is known already."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema and schema["$ref"] not in finite:
        return False
    if not all(_is_finite(part, finite) for part in _parts(schema, "allOf")):
        return False
    for name in _ONE_OF:
        choices = _parts(schema, name)
        if choices and not any(_is_finite(choice, finite) for choice in choices):
            return False
    return all(_is_finite(part, finite) for part in _needed(schema))


def _needed(schema: dict[str, Any]) -> Iterator[Any]:
    """What stands in each value, where all of them are objects, or arrays."""
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") in ("object", ["object"]) and isinstance(required, list):
        others = schema.get("additionalProperties")
        known = properties if isinstance(properties, dict) else {}
        yield from (known.get(name, others) for name in required if isinstance(name, str))
    least = schema.get("minItems")
    if schema.get("type") in ("array", ["array"]) and isinstance(least, int) and least > 0:
        first = _parts(schema, "prefixItems")
        yield from first[:least]
        if least > len(first):
            yield schema.get("items")


def _parts(schema: dict[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _references(schema: Any) -> Iterator[str]:
    """All that stand in it anywhere."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _at(schema: Any, reference: str) -> Any:
    """What a reference within this schema names; None where it leads elsewhere or nowhere."""
    first, *names = reference.split("/")
    if first != "#":
        return None
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(key)] if key.isdecimal() and int(key) < len(schema) else None
        else:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema
