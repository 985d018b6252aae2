"""One platform for the tests of a module: it is what they are about that it goes on. And the kill matrix as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.running_up import Up

_CASE = re.compile(r"test_(?:kill_matrix|batches_kill)\.py::[^\[]+\[(?:(?P<point>.+)-)?(?P<victim>[a-z]+)\]$")
_A_BATCH = "a batch of 1,000 lines"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Point x process: how each case ended, and how many requests were served in it. Nothing where none was run."""
    cells: dict[tuple[str, str], str] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            case = _CASE.search(report.nodeid)
            if case is not None:
                cells[case["point"] or _A_BATCH, case["victim"]] = _cell(outcome, dict(report.user_properties))
    if not cells:
        return
    victims, points = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (1, 0))
    terminalreporter.section("kill -9: point x process")
    terminalreporter.line("right/WRONG, requests served; ~ where the point did not come in time; - not run")
    width = max(map(len, points))
    terminalreporter.line(" " * width + "".join(f"{victim:>12}" for victim in victims))
    for point in points:
        terminalreporter.line(f"{point:{width}}" + "".join(f"{cells.get((point, v), '-'):>12}" for v in victims))


def _cell(outcome: str, properties: dict[str, object]) -> str:
    outcomes = properties.get("outcomes")
    count = f" {outcomes['served']}" if isinstance(outcomes, Counter) else ""
    return ("right" if outcome == "passed" else "WRONG") + count + ("" if properties.get("has come", True) else "~")


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
