"""Grammars as a gateway checks them: good ones pass, and the fault of a bad one is one line for its author."""

from __future__ import annotations

import json
from typing import Any

import pytest

from wire.grammars import MAX_SOURCE_CHARACTERS, fault_of
from wire.messages import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="json_object"),
        Grammar(kind="json_schema", source=json.dumps(SCHEMA)),
        Grammar(kind="json_schema", source="{}"),
        Grammar(kind="regex", source="[0-9]{4}-[0-9]{2}"),
        Grammar(kind="regex", source=r"a/b\n(x|\d+)"),
        Grammar(kind="lark", source='start: "yes" | "no"'),
    ],
)
def test_a_good_grammar_has_no_fault(grammar: Grammar) -> None:
    assert fault_of(grammar) is None


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(kind="gbnf", source="x"), "known are json_object, json_schema, regex, lark"),
        (Grammar(kind="json_schema", source='{"type"'), "the schema is not JSON"),
        (Grammar(kind="json_schema", source="[]"), "the schema must be a JSON object"),
        (Grammar(kind="json_schema", source='{"type": "obj"}'), "obj"),
        (Grammar(kind="json_schema", source='{"type": "object", "if": {}}'), "Unimplemented"),
        (Grammar(kind="json_schema", source='{"$ref": "http://example.org/schema"}'), "example.org"),
        (Grammar(kind="json_schema", source="[" * 50_000), "nested too deeply"),
        (Grammar(kind="regex", source="(a"), "invalid regex"),
        (Grammar(kind="lark", source="start: missing"), "missing"),
        (Grammar(kind="regex", source="a" * (MAX_SOURCE_CHARACTERS + 1)), "at most"),
    ],
)
def test_the_fault_of_a_bad_grammar_is_one_line_that_names_it(grammar: Grammar, words: str) -> None:
    fault = fault_of(grammar)
    assert fault is not None
    assert words in fault
    assert "\n" not in fault


def node(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


ITSELF: dict[str, Any] = {"$ref": "#"}
A: dict[str, Any] = {"$ref": "#/$defs/a"}
ENDLESS: dict[str, dict[str, Any]] = {
    "itself": ITSELF,
    "any of itself": {"anyOf": [ITSELF]},
    "all of itself": {"allOf": [ITSELF]},
    "one of itself": {"oneOf": [ITSELF]},
    "itself and a string": {"allOf": [ITSELF, {"type": "string"}]},
    "each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": A}, "$ref": "#/$defs/a"},
    "a property that it always has": node(a=ITSELF),
    "one of two that both go on": {"anyOf": [node(a=ITSELF), node(b=ITSELF)]},
    "additional ones that it always has": {"type": "object", "required": ["a"], "additionalProperties": ITSELF},
    "items of which there is always one": {"type": "array", "items": ITSELF, "minItems": 1},
    "the second of two items": {"type": "array", "prefixItems": [{}, ITSELF], "minItems": 2},
    "deep within what has begun well": node(a=node(b=A)) | {"$defs": {"a": A}},
    "a definition's property": node(a={"$ref": "#/properties/a"}),
}
FINITE: dict[str, dict[str, Any]] = {
    "a tree": node(name={"type": "string"}, children={"type": "array", "items": ITSELF}),
    "a list that ends": node(next={"anyOf": [ITSELF, {"type": "null"}]}),
    "itself or a string": {"anyOf": [ITSELF, {"type": "string"}]},
    "a property that it may have": {"type": "object", "properties": {"a": ITSELF}},
    "an object or none": node(a=ITSELF) | {"type": ["object", "null"]},
    "no item, or some": {"type": "array", "items": ITSELF},
    "trees of two kinds": {
        "$defs": {"a": node(b={"type": "array", "items": {"$ref": "#/$defs/b"}}), "b": node(a=A)},
        **A,
    },
    "an unused definition": {"$defs": {"a": A}, "type": "string"},
    "a chain of definitions": {
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(500)} | {"d500": {"type": "null"}},
        "$ref": "#/$defs/d0",
    },
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_whose_values_would_never_end_is_named_as_such(name: str) -> None:
    fault = fault_of(Grammar(kind="json_schema", source=json.dumps(ENDLESS[name])))
    assert fault == "a value of the schema would need another of its own kind within it, without end"


@pytest.mark.parametrize("name", FINITE)
def test_a_schema_that_speaks_of_itself_and_can_end_has_no_fault(name: str) -> None:
    assert fault_of(Grammar(kind="json_schema", source=json.dumps(FINITE[name]))) is None
