"""What a gateway and a worker must agree on about grammars: how they are written for llguidance (extra ``grammar``).

Knows the kinds of grammar; refuses to know tokens. Without the extra nothing is supported, and everybody says so.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from wire.finite_schemas import has_no_finite_value, most_properties
from wire.messages import Grammar

KINDS = ("json_object", "json_schema", "regex", "lark")
MAX_SOURCE_CHARACTERS = 65_536
MAX_PROPERTIES = 400  # of one object: what may follow costs its parser a multiple of them
# Free whitespace lets a weak model write blanks for ever; this is enough for indented JSON.
JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"\n?[ ]{0,32}"}}
# Where only one text can follow, the model still chooses the tokens: it knows its own tokenizer, the worker does not.
_HEADER = '%llguidance {"no_forcing": true}'


class GrammarError(Exception):
    """A grammar that cannot be used. The message is a sentence for its author."""


def is_supported() -> bool:
    """Whether this process can check and compile grammars."""
    return importlib.util.find_spec("llguidance") is not None


def source_of(grammar: Grammar) -> str:
    """The grammar in llguidance's own words. Raises GrammarError where its form is wrong; it may still be nonsense."""
    from llguidance import LLMatcher, regex_to_lark

    source = grammar.source
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise GrammarError(f"it has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are taken")
    match grammar.kind:
        case "json_object":
            rules = f"start: %json {json.dumps({'type': 'object'} | JSON_OPTIONS)}"
        case "json_schema":
            rules = f"start: %json {json.dumps(JSON_OPTIONS | _schema(source))}"
        case "regex":
            rules = f"start: /{regex_to_lark(source)}/"
        case "lark":
            rules = source
        case _:
            raise GrammarError(f"kind {grammar.kind!r} is unknown; known are {', '.join(KINDS)}")
    return LLMatcher.grammar_from_lark(rules if "%llguidance" in rules else f"{_HEADER}\n{rules}")


def _schema(source: str) -> dict[str, Any]:
    try:
        schema = json.loads(source)
        if not isinstance(schema, dict):
            raise GrammarError("the schema must be a JSON object")
        if most_properties(schema) > MAX_PROPERTIES:
            raise GrammarError(f"an object of the schema has more than {MAX_PROPERTIES} properties")
        if has_no_finite_value(schema):
            raise GrammarError("a value of the schema would need another of its own kind within it, without end")
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply") from error
    return schema


def fault_of(grammar: Grammar) -> str | None:
    """What is wrong with it, in one line, or None. May take 100 ms and more: not for an event loop."""
    from llguidance import LLMatcher

    try:
        is_wrong, words = LLMatcher.validate_grammar_with_warnings(source_of(grammar))
    except GrammarError as error:
        return str(error)
    return words[0].strip().partition("\n")[0] if is_wrong else None
