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
    found = named(project_root / "tests")
    assert [f"P{row:02}" for row in ROWS if row not in elsewhere and row not in found] == []


def test_no_case_has_both_a_test_and_an_excuse(project_root: Path) -> None:
    assert named(project_root / "tests") & NOT_YET.keys() == set()


def test_a_case_that_is_measured_is_named_by_its_benchmark(project_root: Path) -> None:
    for row, where in MEASURED.items():
        source = (project_root / where.partition(":")[0]).read_text()
        assert f"P{row}" in source


# Sections B, C and D of the scheduler's case list: victims, resume, swap. Each row has a test of the engine on the
# simulated device or of the real executor with its tiny model, and those about copies, fences, resume and what a text
# comes to have one of the real executor.
SCHEDULER_ROWS = (
    *(20, 21, 23, 24, 26, 27, 28, 30, 31, 32, 33, 34),
    *(40, 41, 42, 44, 45, 47, 48, 49, 50, 51, 53, 54, 57, 58),
    *(60, 61, 63, 64, 65, 66, 68, 69, 71, 72),
)
REAL_EXECUTOR = ("tests/gpu_worker/model", "tests/gpu_worker/kernels")
ENGINE_ALONE = {  # whom to choose and when: the same plan whatever carries it out
    20: "how many victims",
    21: "what a victim counts for",
    23: "which victim",
    24: "growth comes before the plan is written",
    26: "the order in which requests get their step",
    31: "how often somebody gives way; texts in a shared tight pool: test_prefix_hits.py",
    33: "one victim for several heads",
    34: "what an arrival costs: benchmarks/scheduler.py",
    41: "the governor",
    42: "the share of time that switching takes",
    45: "the place in line",
    47: "slots while a copy is under way; the executor's copies are done in order, so nobody is parked",
    48: "headroom",
    68: "the executor's copies are done in order, so nobody waits for a load of somebody else",
    72: "the price of a copy beside that of a recompute",
}
NOT_BUILT = {53: "not applicable until one model runs on several devices"}


def scheduler_rows_named(project_root: Path, *folders: str) -> set[int]:
    """Numbers that stand as S01 or test_s01 in the sources of these folders' tests."""
    sources = [path.read_text() for folder in folders for path in (project_root / folder).rglob("test_*.py")]
    return {
        int(number) for source in sources for number in re.findall(r"(?:\bS|\btest_s)(\d{2,3})(?![0-9A-Za-z])", source)
    }


def test_each_row_about_copies_fences_and_resume_is_a_test_on_the_real_executor(project_root: Path) -> None:
    found = scheduler_rows_named(project_root, *REAL_EXECUTOR)
    elsewhere = {**ENGINE_ALONE, **NOT_BUILT}
    assert [f"S{row}" for row in SCHEDULER_ROWS if row not in elsewhere and row not in found] == []


def test_each_row_that_is_the_engines_alone_is_a_test_of_the_engine(project_root: Path) -> None:
    found = scheduler_rows_named(project_root, "tests/scheduler_engine")
    measured = {34, 68}  # a figure, and a wait that the executor cannot have
    assert [f"S{row}" for row in ENGINE_ALONE if row not in measured and row not in found] == []


def test_no_row_of_the_scheduler_has_both_a_test_on_the_real_executor_and_an_excuse(project_root: Path) -> None:
    assert scheduler_rows_named(project_root, *REAL_EXECUTOR) & {*ENGINE_ALONE, *NOT_BUILT} == set()
