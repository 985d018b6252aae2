"""Grammars as a gateway checks them: good ones pass, and the fault of a bad one is one line for its author."""

from __future__ import annotations

import json

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
