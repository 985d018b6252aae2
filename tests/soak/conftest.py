"""One platform for the tests of a module: it is what they are about that it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.running_up import Up


@pytest.fixture(scope="module")
def platform(
    project_root: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Up]:
    """Serving already; a module's ``UP_ARGUMENTS`` go to the command line."""
    running = Up(project_root, tmp_path_factory.mktemp("soak") / "data", *request.module.UP_ARGUMENTS)
    try:
        running.wait_until_serving()
        yield running
    finally:
        running.stop()
