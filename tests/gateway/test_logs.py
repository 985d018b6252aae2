"""What stands in the log, and what never does."""

from __future__ import annotations

import io
import json
import logging
import logging.config
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from gateway import logs
from gpu_worker.serving.outage import say

PROMPT = "the colour of my secret is vermilion"


@pytest.fixture(params=[True, False], ids=["json", "line"])
def written(request: pytest.FixtureRequest) -> Iterator[tuple[io.StringIO, bool]]:
    """All loggers at DEBUG into memory, in each of the two formats."""
    stream = io.StringIO()
    configuration = logs.configuration(is_json=request.param, level="DEBUG")
    formatter = logs.JsonLines() if request.param else logs.LineFormatter("{levelname} {name}: {message}", style="{")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    handler.addFilter(logs.Bound())
    handler.addFilter(lambda record: not record.name.startswith(("openai", "httpx2", "httpcore2")))  # the client's own
    root, own = logging.getLogger(), logs.requests
    before = root.level, own.level
    root.addHandler(handler)
    root.setLevel("DEBUG")
    own.setLevel(configuration["loggers"]["gateway.requests"]["level"])
    yield stream, request.param
    root.removeHandler(handler)
    root.setLevel(before[0])
    own.setLevel(before[1])


async def test_a_run_writes_neither_keys_nor_prompts_nor_answers(world: Any, written: Any) -> None:
    stream, is_json = written
    client = world.client("aurora")
    message: list[Any] = [{"role": "user", "content": PROMPT}]
    answer = await client.chat.completions.create(model="simulated", messages=message)
    text = answer.choices[0].message.content
    async with httpx2.AsyncClient(base_url=world.base_url) as http:
        refused = await http.post("/v1/chat/completions", content=b"{", headers={"authorization": "Bearer sk_demo_x"})
        leaked = await http.get(f"/v1/models/{world.keys['aurora']}?api_key={world.keys['aurora']}")
    logging.getLogger("gateway").warning("somebody wrote %s here", world.keys["nova"])
    out = stream.getvalue()

    assert refused.status_code == 401
    assert leaked.status_code in (401, 404)
    assert text
    assert len(text) > 8
    for secret in (*world.keys.values(), PROMPT, text):
        assert secret not in out
    assert "somebody wrote sk_… here" in out
    if is_json:
        lines = [json.loads(line) for line in out.splitlines()]
        [chat] = [line for line in lines if line["logger"] == "gateway.requests" and line["status"] == 200]
        assert chat["message"] == "POST /v1/chat/completions"
        assert chat["tenant"] == "aurora"
        assert chat["class"] == "default"
        assert chat["request_id"].startswith("req_")
        assert chat["level"] == "INFO"
        assert "time" in chat


def test_a_worker_speaks_json_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    say("plain")
    monkeypatch.setenv("LOG_FORMAT", "json")
    say('a step hangs\n"here"')
    plain, line = capsys.readouterr().err.splitlines()

    assert plain == "plain"
    assert json.loads(line)["message"] == 'a step hangs\n"here"'


@pytest.mark.parametrize(("is_json", "formatter"), [(True, "json"), (False, "line")])
def test_the_format_is_chosen_by_the_environment(is_json: bool, formatter: str) -> None:
    configuration = logs.configuration(is_json=is_json, level="INFO")

    logging.config.DictConfigurator(configuration).configure_formatter(dict(configuration["formatters"][formatter]))
    assert configuration["handlers"]["stderr"]["formatter"] == formatter


@pytest.mark.parametrize(("status", "has_traceback"), [(400, False), (500, True)])
def test_a_callers_mistake_is_a_line_and_a_failure_of_ours_a_traceback(status: int, has_traceback: bool) -> None:
    configuration = logs.configuration(is_json=False, level="INFO")
    configured = logging.config.DictConfigurator(configuration)
    error = ValueError("a NUL character")
    record = logging.LogRecord("django.request", logging.WARNING, "", 0, "no", (), (ValueError, error, None))
    record.status_code = status
    for name in configuration["handlers"]["stderr"]["filters"]:
        assert configured.configure_filter(dict(configuration["filters"][name])).filter(record)

    assert ("ValueError" in logging.Formatter().format(record)) is has_traceback


def test_names_that_are_bound_stay_with_their_task() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "hello", (), None)
    assert logs.Bound().filter(record)

    assert not hasattr(record, "tenant")
