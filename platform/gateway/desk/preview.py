"""What an edit would have done to recorded traffic: the worker's replay, a process of its own that can be stopped.

Its state is kept in Redis, so that any gateway can show it. Refuses to compute anything itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import uuid
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from django.conf import settings
from redis.exceptions import RedisError

from gateway.desk.replaying import HOUR, NICE, command
from gateway.desk.telling import PATIENCE_S
from tenants.policy_changes import Document
from wire.redis_bus import connect
from wire.redis_keys import Keys

KEPT_S = 3_600
SILENT_S = 120  # without a word for so long, whoever ran it is gone
LIMIT_S = 1_800


@dataclass(frozen=True, slots=True)
class Preview:
    """``state`` is running, done, failed or stopped; ``result`` is the replay's JSON once it is done. ``run``: which of
    the draft's replays says so.
    """

    state: str
    run: str = ""
    minutes: int = HOUR
    percent: int = 0
    doing: str = ""
    result: dict[str, Any] | None = None


class Previews:
    """Always: a draft's newest replay is the only one that goes on and is told; nothing of another stays on disk."""

    def __init__(self) -> None:
        self._keys = Keys(settings.RUBATO_REDIS_PREFIX)

    def find(self, draft_id: str) -> Preview | None:
        """None where none was started within the hour."""
        try:
            with closing(connect(settings.REDIS_URL, timeout_s=PATIENCE_S)) as client:
                held = client.get(self._key(draft_id))
        except RedisError:
            return Preview("failed", doing="Redis does not answer")
        return Preview(**json.loads(held)) if isinstance(held, bytes) else None

    def start(self, draft_id: str, document: Document, minutes: int = HOUR) -> Preview:
        """The one that runs already, or a new one of the last so many minutes."""
        found = self.find(draft_id)
        if found is not None and found.state == "running":
            return found
        folder = Path(settings.RUBATO_RECORDED_DIR)
        if not folder.is_dir():
            return self._keep(draft_id, Preview("failed", doing="no worker has recorded any traffic here yet"))
        first = self._keep(draft_id, Preview("running", uuid.uuid4().hex, minutes, doing="starting"))
        runner = threading.Thread(
            target=self._run, args=(draft_id, first, document, folder), name="policy preview", daemon=True
        )
        runner.start()
        return first

    def stop(self, draft_id: str) -> None:
        self._keep(draft_id, Preview("stopped", doing="stopped"))

    def _key(self, draft_id: str) -> str:
        return f"{self._keys.prefix}desk:preview:{draft_id}"

    def _keep(self, draft_id: str, preview: Preview) -> Preview:
        with closing(connect(settings.REDIS_URL, timeout_s=PATIENCE_S)) as client:
            kept_s = SILENT_S if preview.state == "running" else KEPT_S
            client.set(self._key(draft_id), json.dumps(asdict(preview)), ex=kept_s)
        return preview

    def _is_wanted(self, draft_id: str, mine: Preview) -> bool:
        now = self.find(draft_id)
        return now is not None and (now.state, now.run) == ("running", mine.run)

    def _run(self, draft_id: str, mine: Preview, document: Document, folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            policy = Path(scratch) / "policy.json"
            policy.write_text(json.dumps(document), encoding="utf-8")
            with (Path(scratch) / "out").open("w+", encoding="utf-8") as out:  # a pipe that nobody reads would fill
                process = subprocess.Popen(
                    command(folder, policy, mine.minutes),
                    cwd=settings.BASE_DIR,
                    stdout=out,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                with contextlib.suppress(ProcessLookupError):  # it may have ended already
                    os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
                last = self._watched(draft_id, mine, process)
                out.seek(0)
                said = out.read()
        if self._is_wanted(draft_id, mine):
            if process.returncode == 0:
                result = json.loads(said.splitlines()[-1])
                self._keep(draft_id, replace(mine, state="done", percent=100, result=result))
            else:
                self._keep(draft_id, replace(mine, state="failed", doing=_in_words(last, policy, folder)))

    def _watched(self, draft_id: str, mine: Preview, process: subprocess.Popen[str]) -> str:
        """Until it has ended, by itself or not; returns its last plain line."""
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            return self._watch(draft_id, mine, process)
        finally:
            limit.cancel()
            process.wait()

    def _watch(self, draft_id: str, mine: Preview, process: subprocess.Popen[str]) -> str:
        """Tells the progress until the process ends or somebody stops it."""
        last = ""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                if not line.startswith("{"):
                    last = line.strip()[:300]
                    continue
                told = json.loads(line)
                if not self._is_wanted(draft_id, mine):
                    process.kill()
                    break
                self._keep(draft_id, replace(mine, percent=told["percent"], doing=told["doing"]))
        return last


def _in_words(said: str, policy: Path, folder: Path) -> str:
    """What the replay said last, without the names of its flags and files."""
    told = said.removeprefix("gpu_worker.replay: ").replace(f"--policy {policy}: ", "this edit is no policy: ")
    return told.replace(str(folder), "the recording") or "it took too long"
