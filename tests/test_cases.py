"""Every row of the case list of the platform has a test that names it, or stands here with the reason why not."""

from __future__ import annotations

import re
from pathlib import Path

# Bug reports of others that this platform must be immune to; the numbers are the case list's.
ROWS = (
    *(1, 3, 4, 5, 6, 7, 10, 11, 13, 14, 15, 18, 19, 20, 21, 23, 24, 25, 27, 28, 30, 31, 32, 33, 34, 36, 37, 38, 39),
    *(41, 42, 43, 44, 45, 46, 47, 49, 50, 51, 52, 54, 55, 56, 57, 58, 60, 61, 63, 64, 65, 67, 69, 70, 71, 72, 73),
    *(75, 76, 77, 78, 81, 83),
)
MEASURED = {  # by a benchmark, printed and never asserted
    73: "benchmarks/gateway.py: latency while clients hang up",
    81: "benchmarks/gateway.py: requests per CPU second of the gateway",
}
NOT_YET = {
    78: "not applicable until a release with data of others exists: the first migrations make empty tables",
}


def named(folder: Path) -> set[int]:
    """Numbers that stand as P01 and the like in the sources of tests."""
    sources = (path for path in folder.rglob("*.py") if path != Path(__file__).resolve())
    return {int(number) for path in sources for number in re.findall(r"\bP(\d{2})\b", path.read_text())}


def test_every_case_is_a_test_a_measurement_or_has_a_reason(project_root: Path) -> None:
    elsewhere = {**MEASURED, **NOT_YET}
    missing = [f"P{row:02}" for row in ROWS if row not in elsewhere and row not in named(project_root / "tests")]
    assert missing == []


def test_no_case_has_both_a_test_and_an_excuse(project_root: Path) -> None:
    assert named(project_root / "tests") & NOT_YET.keys() == set()


def test_a_case_that_is_measured_is_named_by_its_benchmark(project_root: Path) -> None:
    for row, where in MEASURED.items():
        source = (project_root / where.partition(":")[0]).read_text()
        assert f"P{row}" in source
