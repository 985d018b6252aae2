"""Every way in which the door says no, as the official client raises it, and as docs/api.md has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from gateway.errors import Reason, Refusal, Retry
from gateway.v1.http import Exchange

CLASSES: dict[int, type[openai.APIStatusError]] = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    422: openai.UnprocessableEntityError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
    503: openai.InternalServerError,
    405: openai.APIStatusError,
    408: openai.APIStatusError,
    413: openai.APIStatusError,
    415: openai.APIStatusError,
}
RETRIED = (408, 409, 429, 500, 503)  # by the client, unless it is told not to


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    """Refuses for the reason that its path names."""
    refusal = Refusal(reason=Reason(scope["path"].rpartition("/")[2]), message="No.", param="model")
    await Exchange(scope, receive, send).refuse(refusal)


@pytest.mark.parametrize("reason", list(Reason))
async def test_each_refusal_is_raised_as_the_class_of_its_status_and_says_whether_to_come_back(reason: Reason) -> None:
    refusal = Refusal(reason=reason, message="No.")
    transport = httpx2.ASGITransport(app=refusing)
    async with httpx2.AsyncClient(transport=transport) as http_client:
        client = AsyncOpenAI(base_url="http://door/v1", api_key="k", max_retries=0, http_client=http_client)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.get(f"/{reason}", cast_to=object)
    raised = caught.value
    assert type(raised) is CLASSES[refusal.status]
    assert (raised.status_code, raised.code) == (refusal.status, refusal.row.code)
    assert (raised.type, raised.param) == (refusal.row.error_type, "model")
    assert raised.request_id is not None
    may_help = {Retry.SILENT: refusal.status in RETRIED, Retry.NEVER: False, Retry.LATER: True}[refusal.row.retry]
    may_help = may_help and reason is not Reason.DEADLINE  # with no time to come back at, no wait helps
    assert OpenAI(api_key="k")._should_retry(raised.response) is may_help


def test_the_table_of_the_docs_is_the_table_of_the_door(project_root: Path) -> None:
    table = (project_root / "docs" / "api.md").read_text().partition("## Errors")[2].partition("## Headers")[0]
    told = {
        (int(status), code)
        for line in table.splitlines()
        for statuses, codes in re.findall(r"^\| ([0-9, ]+) \| (.*?) \|", line)
        for status in statuses.split(",")
        for code in re.findall(r"`([a-z_]+)`", codes)
    }
    rows = {(refusal.status, refusal.row.code) for refusal in (Refusal(reason=one, message="") for one in Reason)}
    types = {(429, "requests"), (429, "tokens"), (429, "rate_limit_error")}  # told beside the code that has three
    assert told - types == rows
