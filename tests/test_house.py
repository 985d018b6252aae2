"""The house rules that no linter holds: where files may lie, and what the standard library must still be."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("platform/gateway", "platform/wire", "tenants", "billing", "scheduler_engine", "gpu_worker")
LONGEST_MODULE = 400


def _sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "migrations" not in path.parts]


def test_platform_is_a_plain_folder_and_holds_packages_only() -> None:
    assert [path.name for path in (ROOT / "platform").glob("*.py")] == []


def test_the_standard_librarys_platform_module_still_answers() -> None:
    assert platform.system() in ("Linux", "Darwin")
    assert Path(str(platform.__file__)).name == "platform.py"


@pytest.mark.parametrize("arguments", [["-c", "import uuid, platform; platform.system()"], ["-m", "uuid"]])
def test_a_program_started_in_the_root_finds_the_standard_library(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tests_are_no_packages_and_no_folder_is_named_platform() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    assert not (ROOT / "tests" / "platform").exists()


def test_every_folder_of_the_product_is_a_package() -> None:
    for folder in {path.parent for path in _sources(*PACKAGES)}:
        assert (folder / "__init__.py").exists(), folder


def test_no_module_passes_the_wall_of_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in _sources(*PACKAGES)}
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_every_module_says_what_it_knows() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in _sources(*PACKAGES)
        if (body := path.read_text()).strip() and ast.get_docstring(ast.parse(body)) is None
    ]
    assert silent == []


def test_nobody_catches_everything() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources(*PACKAGES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert wide == []


@pytest.mark.parametrize("name", ["scheduler_engine.request", "wire.messages", "wire.bus", "gpu_worker.executor"])
def test_the_shared_vocabulary_needs_nothing_but_the_standard_library(name: str) -> None:
    """A bare GPU box has torch and no more: these modules must import where nothing is installed."""
    program = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'platform')!r}]; import {name}"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_web_process_never_loads_torch() -> None:
    program = "import django, sys; django.setup(); import gateway.asgi; assert 'torch' not in sys.modules"
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "gateway.settings", "DATABASE_URL": "", "REDIS_URL": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_every_requirement_is_pinned_to_one_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    pins = {_normal(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(pins) == len(lines)
    assert [requirement for requirement in _requirements() if not pins.get(_normal(requirement))] == []


def test_everything_imported_is_a_declared_requirement() -> None:
    declared = {_normal(requirement) for requirement in _requirements()}
    ours = {"tests", "benchmarks", *(Path(package).name for package in PACKAGES), *sys.stdlib_module_names}
    providers = importlib.metadata.packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in _sources(*PACKAGES, "tests")
        for name in _imports(path)
        if name not in ours and not {_normal(provider) for provider in providers.get(name, [name])} & declared
    }
    assert undeclared == set()


def _requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]


def _imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _normal(requirement: str) -> str:
    """The bare name: ``redis[hiredis]>=5; python_version …`` is ``redis``."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()
