"""Platforms that end with the test that started them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.running_up import Up


@pytest.fixture
def up(project_root: Path, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts one on the test's own data folder; words go to the command line."""
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(project_root, tmp_path / "data", *arguments))
        return started[-1]

    yield start
    for one in started:
        one.stop()
