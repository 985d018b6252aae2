"""The runbook's pictures, made from the running product: what the board shows when something is wrong.

    python -m benchmarks.runbook_pictures [--out docs/pictures] [--only overload ...]

Each scene is brought about for real: too little KV memory, more chats than the device can serve, a worker stopped in
the middle of its work, three tokens added to what an engine says it counted. Needs what ``benchmarks.pictures`` needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

from benchmarks.pictures import ROOT, Traffic, photograph, product, signed_in
from wire.redis_bus import connect
from wire.redis_keys import Keys

PREFIX = "rubato:"
CALM_S = 35  # until the lanes are empty again
BOOKS_LIMIT_MS = 150_000  # the settler compares once a minute
Scene = Callable[[Page, Traffic, dict[str, Any], Path], Awaitable[None]]


async def thrashing(page: Page, traffic: Traffic, demo: dict[str, Any], data: Path) -> None:
    """Answers that outgrow the memory they were let in with, and chats that push them out again and again."""
    traffic.start("bulk", "batch", num_at_once=20, num_words=40, max_tokens=1_500)
    traffic.start("aurora", "default", num_at_once=24, num_words=40, max_tokens=900, pause_s=0.5)
    traffic.start("aurora", "interactive", num_at_once=12, num_words=120, max_tokens=40, pause_s=0.8)
    await asyncio.sleep(34)


async def starvation(page: Page, traffic: Traffic, demo: dict[str, Any], data: Path) -> None:
    """Chats and default work of one tenant leave batch its floor and hardly more."""
    traffic.start("bulk", "batch", num_at_once=20, num_words=40, max_tokens=100)
    traffic.start("aurora", "default", num_at_once=30, num_words=60, max_tokens=80)
    traffic.start("aurora", "interactive", num_at_once=16, num_words=40, max_tokens=60)
    await asyncio.sleep(34)


async def overload(page: Page, traffic: Traffic, demo: dict[str, Any], data: Path) -> None:
    """Far more chats than the device can begin in time."""
    traffic.start("bulk", "batch", num_at_once=16, num_words=30, max_tokens=100)
    traffic.start("bulk", "default", num_at_once=20, num_words=40, max_tokens=60)
    await asyncio.sleep(10)
    traffic.start("aurora", "interactive", num_at_once=80, num_words=60, max_tokens=40)
    await asyncio.sleep(24)


async def worker_lost(page: Page, traffic: Traffic, demo: dict[str, Any], data: Path) -> None:
    """Stopped, not killed: nobody starts it again, and it says nothing."""
    traffic.start("bulk", "batch", num_at_once=60, num_words=150, max_tokens=400)
    traffic.start("aurora", "interactive", num_at_once=6, num_words=60, max_tokens=60, pause_s=1.0)
    await asyncio.sleep(20)
    said = "".join(demo["said"])
    pid = int(re.findall(r"^worker +\| ready after .*\(pid (\d+),", said, re.MULTILINE)[-1])
    os.kill(pid, signal.SIGSTOP)
    demo["afterwards"] = lambda: os.kill(pid, signal.SIGCONT)
    await page.locator(".worker.is-old").wait_for()
    await asyncio.sleep(4)


async def books_differ(page: Page, traffic: Traffic, demo: dict[str, Any], data: Path) -> None:
    """Three tokens more than there were, written where an engine tells what it has counted."""
    traffic.start("aurora", "interactive", num_at_once=6, num_words=60, max_tokens=60, pause_s=0.5)
    traffic.start("bulk", "batch", num_at_once=30, num_words=100, max_tokens=200)
    await asyncio.sleep(12)
    services = json.loads((data / "services.json").read_text(encoding="utf-8"))
    with connect(services["REDIS_URL"]) as redis:
        name = Keys(PREFIX).counted("worker-1")
        fields = [one.decode().partition(":") for one in redis.hkeys(name)]
        epoch = max(int(epoch) for epoch, _, kind in fields if kind == "output")
        redis.hincrby(name, f"{epoch}:output", 3)
    await page.locator("#books").wait_for(timeout=BOOKS_LIMIT_MS)


ROOMY: tuple[str, ...] = ()
SLOW = ("--device-profile=cpu-smollm2",)  # the device is short of time or memory long before this machine is
TIGHT = ("--kv-mib=1200",)
SCENES: dict[str, tuple[Scene, tuple[str, ...]]] = {
    "starvation": (starvation, SLOW),
    "overload": (overload, SLOW),
    "worker-lost": (worker_lost, ROOMY),
    "books-differ": (books_differ, ROOMY),  # the last of its platform: what differs stays on the board
    "thrashing": (thrashing, TIGHT),
}


async def pictures(browser: Browser, names: list[str], arguments: tuple[str, ...], out: Path) -> None:
    """Of scenes on one platform, one after the other."""
    with tempfile.TemporaryDirectory(prefix="rubato-pictures-") as folder:
        async with product(Path(folder), *arguments) as demo:
            for name in names:
                await picture(browser, name, demo, Path(folder), out)
                await asyncio.sleep(CALM_S)


async def picture(browser: Browser, name: str, demo: dict[str, Any], data: Path, out: Path) -> None:
    traffic = Traffic(demo)
    page = await signed_in(browser, demo, width=1280)
    try:
        await SCENES[name][0](page, traffic, demo, data)
        await photograph(page, out / f"board-{name}.png", full_page=True)
    finally:
        demo.pop("afterwards", lambda: None)()
        await traffic.stop()
        await page.context.close()


async def main(out: Path, names: list[str]) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for arguments in (ROOMY, SLOW, TIGHT):
            chosen = [name for name in SCENES if name in names and SCENES[name][1] == arguments]
            if chosen:
                await pictures(browser, chosen, arguments, out)
        await browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", nargs="+", choices=list(SCENES), default=list(SCENES), metavar="SCENE")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(given.out.resolve(), given.only))
