"""How the desk has traffic replayed: the worker's replay as a program. Knows its command line; refuses to run it."""

from __future__ import annotations

import sys
from pathlib import Path

FEW_MINUTES, HOUR = 5, 60  # of traffic
DRAWS_S = 12  # after so long no further draw of the noise is begun: each takes as long as the first
NICE = 10  # who is served goes first


def command(folder: Path, policy: Path, minutes: int) -> list[str]:
    """Of the last so many minutes that lie in the folder, under the policy of a file."""
    replay = [sys.executable, "-m", "gpu_worker.replay", str(folder), "--policy", str(policy)]
    return [*replay, f"--minutes={minutes}", f"--seconds={DRAWS_S}", "--json", "--progress"]
