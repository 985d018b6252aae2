"""The pages of the API name every field that a body may have, and every code that a refusal may bear."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from gateway.batches.endpoints import InputLine
from gateway.errors import Reason, Refusal
from gateway.v1 import schemas
from gateway.v1.batches import BatchCreate
from gateway.v1.schemas import ChatRequest, CompletionRequest, Ping, ResponseCancel, ResponseCreate, ResponseResume

BODIES = (ChatRequest, CompletionRequest, ResponseCreate, ResponseCancel, ResponseResume, Ping, BatchCreate, InputLine)


def words(project_root: Path) -> set[str]:
    """Whatever stands in backticks, part by part."""
    pages = "".join((project_root / "docs" / name).read_text() for name in ("api.md", "batches.md"))
    return {word for quoted in re.findall(r"`([^`\n]+)`", pages) for word in re.findall(r"\w+", quoted)}


def structs_of(kind: Any) -> set[type[Struct]]:
    """This one and all that its fields hold."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return {kind}.union(*(structs_of(field.type) for field in msgspec.structs.fields(kind)))
    return set().union(*map(structs_of, getattr(kind, "__args__", ())))


@pytest.mark.parametrize("body", BODIES)
def test_every_field_of_a_body_is_documented(project_root: Path, body: type[Struct]) -> None:
    fields = {field.name for kind in structs_of(body) for field in msgspec.structs.fields(kind)}
    assert sorted(fields - words(project_root)) == []


@pytest.mark.parametrize("body", BODIES)
def test_no_part_of_a_body_leaves_out_a_field_in_silence(body: type[Struct]) -> None:
    open_parts = [kind.__name__ for kind in structs_of(body) if not kind.__struct_config__.forbid_unknown_fields]
    assert open_parts == []


def test_every_struct_of_the_schemas_is_part_of_a_body() -> None:
    known = set[type[Struct]]().union(*map(structs_of, BODIES)) | {schemas.SamplingFields}
    defined = {one for one in vars(schemas).values() if isinstance(one, type) and issubclass(one, Struct)}
    assert defined - known - {Struct} == set()


def test_every_code_of_a_refusal_is_documented(project_root: Path) -> None:
    codes = {Refusal(reason=reason, message="").row.code for reason in Reason}
    assert sorted(codes - words(project_root)) == []
