"""Input files are read once and judged line by line, in the words of the endpoint they address."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from gateway.batches import services, validation
from gateway.batches.endpoints import HANDLERS
from gateway.batches.validation import BadFile, GoodLine, Validator
from tests.gateway.batches.conftest import MODEL, jsonl, request_line

CHAT = "/v1/chat/completions"


def validator(**changes: Any) -> Validator:
    return Validator(**{"endpoint": CHAT, "models": {MODEL}, "body_limit_bytes": 10_000, **changes})


def read(content: bytes, **changes: Any) -> list[GoodLine]:
    return list(validator(**changes).lines(io.BytesIO(content)))


def errors_of(content: bytes, **changes: Any) -> list[dict[str, Any]]:
    with pytest.raises(BadFile) as bad:
        read(content, **changes)
    return bad.value.errors


def test_every_endpoint_that_a_batch_may_address_has_its_handler() -> None:
    assert tuple(HANDLERS) == services.ENDPOINTS


def test_a_good_line_is_known_by_its_number_and_its_bytes_and_empty_lines_count_for_nothing() -> None:
    content = b"\n" + jsonl(request_line("a")) + b"  \n" + jsonl(request_line("b")).rstrip()
    found = read(content)
    assert [(line.number, line.custom_id) for line in found] == [(2, "a"), (4, "b")]
    for line in found:
        raw = content[line.start : line.start + line.num_bytes]
        assert json.loads(raw)["custom_id"] == line.custom_id


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_request", None),
        (b"[]", "invalid_request", None),
        (jsonl({"custom_id": "a"}), "missing_required_parameter", "method"),
        (jsonl({**request_line("a"), "custom_id": ""}), "invalid_value", "custom_id"),
        (jsonl({**request_line("a"), "custom_id": 7}), "invalid_type", "custom_id"),
        (jsonl(request_line("a\0b")), "invalid_value", "custom_id"),
        (jsonl({**request_line("a"), "method": "GET"}), "invalid_value", "method"),
        (jsonl({**request_line("a"), "url": "/v1/embeddings"}), "invalid_value", "url"),
        (jsonl({**request_line("a"), "colour": "red"}), "unknown_parameter", "colour"),
        (jsonl({**request_line("a"), "body": "Hi"}), "invalid_request", None),
        (jsonl(request_line("a", messages=[])), "invalid_value", "messages"),
        (jsonl(request_line("a", temperature=3)), "invalid_value", "temperature"),
        (jsonl(request_line("a", stop=[""])), "invalid_value", "stop"),
        (jsonl(request_line("a", deadline_ms=0)), "invalid_value", "deadline_ms"),
        (jsonl(request_line("a", tools=[{"type": "function"}])), "unsupported_parameter", "tools"),
        (jsonl(request_line("a", stream=True)), "unsupported_parameter", "stream"),
        (jsonl(request_line("a", service_tier="priority")), "unsupported_parameter", "service_tier"),
        (jsonl(request_line("a", model="other")), "model_not_found", "model"),
        (jsonl(request_line("a", words="x" * 11_000)), "request_too_large", "body"),
    ],
)
def test_what_is_wrong_with_a_line_is_told_with_its_number_and_field(line: bytes, code: str, param: str | None) -> None:
    (error,) = errors_of(jsonl(request_line("good")) + line.rstrip() + b"\n" + jsonl(request_line("good too")))
    assert (error["line"], error["code"], error["param"]) == (2, code, param)
    assert error["message"]


def test_a_custom_id_that_comes_twice_is_told_with_both_lines() -> None:
    (error,) = errors_of(jsonl(request_line("a"), request_line("b"), request_line("a")))
    assert (error["line"], error["param"]) == (3, "custom_id")
    assert "line 1" in error["message"]


@pytest.mark.parametrize("content", [b"", b"\n\n \n"])
def test_a_file_without_requests_is_refused(content: bytes) -> None:
    (error,) = errors_of(content)
    assert error["line"] is None


def test_a_file_with_more_requests_than_a_batch_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_LINES", 3)
    (error,) = errors_of(jsonl(*(request_line(str(number)) for number in range(9))))
    assert error["line"] == 4
    assert len(read(jsonl(*(request_line(str(number)) for number in range(3))))) == 3


def test_a_line_without_end_is_not_read_to_its_end() -> None:
    class Endless(io.RawIOBase):
        num_read = 0

        def readline(self, size: int | None = -1) -> bytes:
            assert size is not None
            self.num_read += size
            return b"x" * size

    content = Endless()
    with pytest.raises(BadFile) as bad:
        list(validator().lines(content))  # type: ignore[arg-type]
    assert bad.value.errors[0]["code"] == "request_too_large"
    assert content.num_read < 100_000


def test_no_more_than_a_hundred_errors_are_told() -> None:
    assert len(errors_of(b"{\n" * 200)) == validation.MAX_ERRORS


def test_a_byte_order_mark_at_the_head_of_a_file_is_skipped_and_nowhere_else() -> None:
    mark, lines = validation.BYTE_ORDER_MARK, jsonl(request_line("a"), request_line("b"))
    first, second = read(mark + lines)
    assert (first.start, first.start + first.num_bytes) == (len(mark), second.start)
    assert [error["line"] for error in errors_of(lines + mark + lines)] == [3, 4]
    assert errors_of(mark)[0]["line"] is None
