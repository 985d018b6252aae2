"""What a deployment behind TLS is checked for, and what every answer says to a browser."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest


def test_djangos_own_deployment_check_finds_nothing(project_root: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HTTPS": "1",
        "DATABASE_URL": "",
        "REDIS_URL": "",
        "RUBATO_DATA": str(tmp_path),
        "ALLOWED_HOSTS": "llm.example",
    }
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level=WARNING"],
        cwd=project_root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no issues" in done.stdout


@pytest.mark.parametrize("path", ["/v1/models", "/v1/none", "/V1/models", "/v1/files", "/v1/chat/completions"])
async def test_no_answer_of_the_api_may_be_taken_for_another_type(world: Any, path: str) -> None:
    async with httpx2.AsyncClient(base_url=world.base_url) as client:
        for key in ("", world.keys["aurora"]):
            answer = await client.get(path, headers={"authorization": f"Bearer {key}"} if key else {})
            assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/", "/account/login/", "/v1/organization/projects", "/v1/organization/schema", "/none"]
)
async def test_every_page_says_what_a_browser_may_do_with_it(world: Any, transactional_db: None, path: str) -> None:
    async with httpx2.AsyncClient(base_url=world.base_url) as client:
        headers = (await client.get(path)).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert "default-src 'self'" in headers["content-security-policy"]
