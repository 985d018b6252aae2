"""``manage.py demo``: starts the whole platform, lets chats run through a batch flood, and keeps serving."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from openai import APIError

from gateway.demo_story import Client, Story, StoryError, StoryResult, StoryShape, as_json
from gateway.embedded.service import dying_with_parent
from gateway.supervision.platform_processes import DEVICE_PROFILES
from gateway.text import Message, Text, byte_text
from wire.redis_bus import RedisGatewayBus
from wire.redis_keys import Keys

SERVING = "serving on http"  # the line by which ``up`` says that every process is ready
SENTENCE = "CommandError: "
STOP_LIMIT_S = 60


class Command(BaseCommand):
    help = "Start everything, send chats through a batch flood, print the figures, and keep serving until Ctrl-C."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--exit", action="store_true", help="stop when the story is told")
        parser.add_argument("--json", action="store_true", help="end the story with one JSON line on stdout")
        parser.add_argument("--port", type=int, default=8000, help="port of the gateway on 127.0.0.1 (8000)")
        parser.add_argument("--data", type=Path, default=settings.DATA_DIR, help="where all state is kept (.rubato)")
        parser.add_argument("--model", type=Path, help="GGUF file or model folder (the demo model)")
        parser.add_argument("--executor", choices=("model", "simulated"), default="model", help="what computes tokens")
        parser.add_argument("--device-profile", choices=DEVICE_PROFILES, help="what the simulated device is like")
        parser.add_argument("--kv-mib", type=int, default=192, help="KV memory; the flood shall fill it (192)")
        parser.add_argument("--batch", type=int, default=96, help="requests of the flood (96)")
        parser.add_argument("--batch-alone", type=int, default=48, help="requests of the flood without chats (48)")

    def handle(self, *args: Any, **options: Any) -> None:
        signal.signal(signal.SIGTERM, _interrupt)
        self.stderr.style_func = str  # the story is no error; Django would print it in red
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line per request would bury the story
        platform = _Platform(options, self.stderr)
        try:
            platform.start()
            result = asyncio.run(_tell(platform, options, self._say))
            signal.signal(signal.SIGTERM, _interrupt)  # the loop that has ended took its own handler along
            reconciliation = platform.reconcile()
            line = as_json(result, reconciliation)
            self._report(line, as_json_line=options["json"])
            if not reconciliation["is_right"]:
                raise CommandError("the books differ: engine, ledger and roll-up do not count the same")
            if not options["exit"]:
                self._invite(platform)
                platform.wait()
        except (KeyboardInterrupt, asyncio.CancelledError):
            _ignore_signals()
            self._say("stopping")
        except (StoryError, APIError, OSError) as error:
            raise CommandError(f"The story broke off: {error}. The platform's own words: {platform.log}") from error
        finally:
            _ignore_signals()
            platform.stop()

    def _say(self, sentence: str) -> None:
        self.stderr.write(f"demo     | {sentence}")

    def _report(self, line: dict[str, object], *, as_json_line: bool) -> None:
        if as_json_line:
            self.stdout.write(json.dumps(line))
            return
        for name, value in line.items():
            self.stdout.write(f"{name:<26}{value}")

    def _invite(self, platform: _Platform) -> None:
        demo = platform.demo
        login = demo["admin"]
        self.stdout.write(
            f"\nServing on {demo['base_url']}; Ctrl-C stops everything.\n"
            f"  live board   {demo['base_url']}/operator/live\n"
            f"  admin        {demo['base_url']}/admin/   {login['username']} / {login['password']}\n"
            f"  keys         {platform.data / 'demo.json'}\n\n"
            f"curl {demo['base_url']}/v1/chat/completions -H 'Authorization: Bearer {demo['keys']['aurora']}' \\\n"
            f"  -H 'Content-Type: application/json' \\\n"
            f'  -d \'{{"model": "{demo["model"]}", "temperature": 0, "max_completion_tokens": 64, '
            f'"messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}\''
        )


class _Platform:
    """``manage.py up`` as a child: its lines are shown until it serves. Always: stopped with us."""

    def __init__(self, options: dict[str, Any], terminal: Any) -> None:
        self.data: Path = options["data"].resolve()
        self.log = self.data / "up.log"
        self._terminal = terminal
        self._arguments = [f"--port={options['port']}", f"--data={self.data}", f"--executor={options['executor']}"]
        self._arguments += [f"--kv-mib={options['kv_mib']}"]
        for name in ("model", "device_profile"):
            if options[name] is not None:
                self._arguments.append(f"--{name.replace('_', '-')}={options[name]}")
        self._process: subprocess.Popen[str] | None = None
        self._serving = threading.Event()
        self._last_lines: deque[str] = deque(maxlen=3)

    def start(self) -> None:
        """Raises CommandError with the platform's last words when it does not come up."""
        self.data.mkdir(parents=True, exist_ok=True)
        command = [*dying_with_parent(signal.SIGTERM), sys.executable, str(settings.BASE_DIR / "manage.py"), "up"]
        # A session of its own: Ctrl-C reaches the demo alone, which then stops the platform in order.
        self._process = subprocess.Popen(
            [*command, *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        reader.start()
        while not self._serving.wait(0.2):
            if self._process.poll() is not None:
                reader.join(5)
                raise CommandError(self._last_words)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self.log.open("w", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self._last_lines.append(line.strip())
                if not self._serving.is_set():
                    self._terminal.write(line.rstrip("\n"))
                if SERVING in line:
                    self._serving.set()

    @property
    def _last_words(self) -> str:
        """The sentence by which ``up`` explains its end; its last lines where it had none."""
        said = [line for line in self._last_lines if line.startswith(SENTENCE)]
        return said[-1].removeprefix(SENTENCE) if said else " ".join(self._last_lines) or "it said nothing."

    @property
    def demo(self) -> dict[str, Any]:
        return _read_json(self.data / "demo.json")

    @property
    def addresses(self) -> dict[str, Any]:
        """DATABASE_URL, REDIS_URL and their like, given or embedded."""
        return _read_json(self.data / settings.SERVICES_FILE.name)

    def reconcile(self) -> dict[str, Any]:
        """What ``manage.py reconcile --json`` finds once the usage stream is drained."""
        command = [sys.executable, str(settings.BASE_DIR / "manage.py"), "reconcile", "--json"]
        environment = {**os.environ, **self.addresses, "RUBATO_DATA": str(self.data)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not done.stdout.strip():
            raise CommandError(f"the books could not be read: {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait()
        raise CommandError(f"The platform ended by itself: {self._last_words}")

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


async def _tell(platform: _Platform, options: dict[str, Any], say: Callable[[str], None]) -> StoryResult:
    story = asyncio.current_task()
    assert story is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, story.cancel)
    demo = platform.demo
    bus = RedisGatewayBus(platform.addresses["REDIS_URL"], "demo", keys=Keys(settings.RUBATO_REDIS_PREFIX))
    text = _text(options)
    client = Client(
        base_url=f"{demo['base_url']}/v1",
        model=demo["model"],
        chat_key=demo["keys"]["aurora"],
        batch_key=demo["keys"]["bulk"],
        count=lambda content: len(text.chat_prompt([Message("user", content)])),
        loads=bus.loads,
        say=say,
    )
    try:
        return await Story(client, StoryShape(num_batch=options["batch"], num_batch_alone=options["batch_alone"])).run()
    finally:
        await bus.close()


def _text(options: dict[str, Any]) -> Text:
    """The vocabulary that ``up`` chooses, to make prompts of an exact length."""
    path = options["model"] or Path(settings.RUBATO_MODEL_PATH or settings.RUBATO_DEMO_MODEL_PATH)
    return Text.of_model(path) if path.exists() else byte_text()


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _ignore_signals() -> None:
    """One Ctrl-C may arrive twice, the second time through make: the platform is stopping already."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
