"""What an edit would have done to the recorded hour: the worker's replay, a process of its own that can be stopped.

Its state is kept in Redis, so that any gateway can show it. Refuses to compute anything itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from redis.exceptions import RedisError

from tenants.policy_changes import Document
from wire.redis_bus import connect
from wire.redis_keys import Keys

KEPT_S = 3_600
LIMIT_S = 120
DRAWS_S = 40  # no further draw of the noise is begun after this long: each takes as long as the first did


@dataclass(frozen=True, slots=True)
class Preview:
    """``state`` is running, done, failed or stopped; ``result`` is the replay's JSON once it is done."""

    state: str
    percent: int = 0
    doing: str = ""
    result: dict[str, Any] | None = None


class Previews:
    """Always: at most one process a draft; a stopped one is killed, and nothing of it stays on disk."""

    def __init__(self) -> None:
        self._keys = Keys(settings.RUBATO_REDIS_PREFIX)

    def find(self, draft_id: str) -> Preview | None:
        """None where none was started within the hour."""
        try:
            with closing(connect(settings.REDIS_URL)) as client:
                held = client.get(self._key(draft_id))
        except RedisError:
            return Preview("failed", doing="Redis does not answer")
        return Preview(**json.loads(held)) if isinstance(held, bytes) else None

    def start(self, draft_id: str, document: Document) -> Preview:
        """The one that runs already, or a new one."""
        first = Preview("running", doing="starting")
        with closing(connect(settings.REDIS_URL)) as client:
            is_new = client.set(self._key(draft_id), json.dumps(asdict(first)), ex=KEPT_S, nx=True)
        if not is_new:
            return self.find(draft_id) or first
        folder = Path(settings.RUBATO_RECORDED_DIR)
        if not folder.is_dir():
            return self._keep(draft_id, Preview("failed", doing="no worker has recorded any traffic here yet"))
        runner = threading.Thread(
            target=self._run, args=(draft_id, document, folder), name="policy preview", daemon=True
        )
        runner.start()
        return first

    def stop(self, draft_id: str) -> None:
        self._keep(draft_id, Preview("stopped", doing="stopped"))

    def _key(self, draft_id: str) -> str:
        return f"{self._keys.prefix}desk:preview:{draft_id}"

    def _keep(self, draft_id: str, preview: Preview) -> Preview:
        with closing(connect(settings.REDIS_URL)) as client:
            client.set(self._key(draft_id), json.dumps(asdict(preview)), ex=KEPT_S)
        return preview

    def _run(self, draft_id: str, document: Document, folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            policy = Path(scratch) / "policy.json"
            policy.write_text(json.dumps(document), encoding="utf-8")
            command = [sys.executable, "-m", "gpu_worker.replay", str(folder), "--policy", str(policy)]
            with (Path(scratch) / "out").open("w+", encoding="utf-8") as out:  # a pipe that nobody reads would fill
                process = subprocess.Popen(
                    [*command, "--json", "--progress", f"--seconds={DRAWS_S}"],
                    cwd=settings.BASE_DIR,
                    stdout=out,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                last = self._watched(draft_id, process)
                out.seek(0)
                said = out.read()
        now = self.find(draft_id)
        if now is not None and now.state == "running":
            if process.returncode == 0:
                self._keep(draft_id, Preview("done", 100, result=json.loads(said.splitlines()[-1])))
            else:
                self._keep(draft_id, Preview("failed", doing=last or "it took too long"))

    def _watched(self, draft_id: str, process: subprocess.Popen[str]) -> str:
        """Until it has ended, by itself or not; returns its last plain line."""
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            return self._watch(draft_id, process)
        finally:
            limit.cancel()
            process.wait()

    def _watch(self, draft_id: str, process: subprocess.Popen[str]) -> str:
        """Tells the progress until the process ends or somebody stops it."""
        last = ""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                if not line.startswith("{"):
                    last = line.strip()[:300]
                    continue
                told = json.loads(line)
                now = self.find(draft_id)
                if now is None or now.state != "running":
                    process.kill()
                    break
                self._keep(draft_id, Preview("running", told["percent"], told["doing"]))
        return last
