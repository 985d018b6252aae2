"""The command for a GPU, rehearsed on a CPU where nothing but torch, triton and transformers may be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[3]
BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("django", "msgspec", "redis", "gguf", "channels", "celery", "psycopg"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from benchmarks.gpu import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.soak
def test_the_command_for_a_gpu_goes_through_all_its_parts_on_a_bare_image() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BARE, "--rehearse", "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rehearsal"]
    assert found["wrong_kernels"] == []
    assert found["model"]["decode"]["2 x 20"]["ms"] > 0
    assert found["model"]["swap"]["out_gb_per_s"] > 0
    assert found["flood"]["chats_answered"] > 0
    assert found["transformers"]["requests"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_command_says_how_to_rehearse(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err
