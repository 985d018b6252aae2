"""The worker where there is no Django and no platform: it starts, says what it can do, and tests itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A finder that knows no such packages: as in an environment in which they were never installed.
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["gpu_worker", *{arguments}]
import runpy
runpy.run_module("gpu_worker", run_name="__main__")
"""
PLATFORM = {"django", "rest_framework", "celery", "channels", "psycopg", "tenants", "billing", "gateway", "granian"}


def run_without(absent: set[str], *arguments: str, root: Path) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(absent=absent, arguments=list(arguments))
    environment = {"PYTHONPATH": f"{root}:{root / 'platform'}", "OMP_NUM_THREADS": "1", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def test_it_tests_itself_without_django_and_without_the_extras(project_root: Path) -> None:
    absent = PLATFORM | {"llguidance", "gguf", "tokenizers", "transformers", "numba"}
    finished = run_without(absent, "--self-test", root=project_root)
    assert (finished.returncode, finished.stdout) == (0, ""), finished.stderr
    lines = finished.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["attention", "swap", "recompute", "poison"]
    assert lines[0] == "attention: copies contexts first (numba, in the extra [cpu], would read them in place)"
    assert lines[-1].startswith("self-test passed in ")


def test_with_the_extra_for_cpus_it_checks_the_compiled_attention(project_root: Path) -> None:
    pytest.importorskip("numba", reason="the extra cpu is not installed")
    finished = run_without(PLATFORM | {"triton"}, "--self-test", root=project_root)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.startswith("attention: reads contexts in place, as its reference has it in ")


@pytest.mark.parametrize("argument", ["--help", "--executor=nonsense"])
def test_it_explains_itself_without_django_and_torch(project_root: Path, argument: str) -> None:
    finished = run_without(PLATFORM | {"torch", "numpy", "llguidance"}, argument, root=project_root)
    assert "--model PATH" in finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.returncode == (0 if argument == "--help" else 2)
