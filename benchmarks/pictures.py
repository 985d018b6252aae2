"""The README's pictures, made from the running product: the board during a flood, pages, what a policy edit would do.

    python -m benchmarks.pictures [--out docs/pictures] [--seconds 25]

Starts ``manage.py up`` with the simulated executor in a folder of its own, lets Bulk and Nova flood it while Aurora
chats, and photographs the pages in Chromium. Needs Chromium and the packages of ``dev`` and ``demo``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

ROOT = Path(__file__).parents[1]
SERVING = "serving on http"
START_LIMIT_S = 300
MOST_BYTES = 150_000
NUM_COLOURS = 96
PREVIEW_LIMIT_MS = 120_000
PAGES = {
    "start": "/console/aurora/",
    "usage": "/console/aurora/usage?span=day&by=class",
    "alerts": "/console/aurora/alerts",
    "quotas": "/operator/policy/",
}
TIERS = {"interactive": "priority", "default": "default", "batch": "flex"}


@asynccontextmanager
async def product(data: Path, *more: str) -> AsyncIterator[dict[str, Any]]:
    """``manage.py up``, until the block ends; its demo.json, and under ``said`` the lines it has printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [f"--data={data}", f"--port={port}", "--executor=simulated", "--device-profile=h200-8b", *more]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "manage.py"),
        "up",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not said or SERVING not in said[-1]:
                line = (await process.stdout.readline()).decode()
                if not line:
                    raise SystemExit("the product did not start:\n" + "".join(said[-10:]))
                said.append(line)
        reading = asyncio.create_task(_read_on(process.stdout, said))
        yield {**json.loads((data / "demo.json").read_text(encoding="utf-8")), "said": said}
        reading.cancel()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def _read_on(stream: asyncio.StreamReader, said: list[str]) -> None:
    while line := await stream.readline():
        said.append(line.decode())


class Traffic:
    """Tenants that ask until told to stop."""

    def __init__(self, demo: dict[str, Any]) -> None:
        self._demo = demo
        self._clients = {
            name: AsyncOpenAI(base_url=demo["base_url"] + "/v1", api_key=key, max_retries=0)
            for name, key in demo["keys"].items()
        }
        self._tasks: list[asyncio.Task[None]] = []

    def start(
        self, tenant: str, name: str, *, num_at_once: int, num_words: int, max_tokens: int, pause_s: float = 0.0
    ) -> None:
        for number in range(num_at_once):
            work = self._ask_again_and_again(tenant, TIERS[name], num_words, max_tokens, pause_s, number)
            self._tasks.append(asyncio.create_task(work))

    async def _ask_again_and_again(
        self, tenant: str, tier: Any, num_words: int, max_tokens: int, pause_s: float, number: int
    ) -> None:
        await asyncio.sleep(number * 0.02)
        for turn in itertools.count():
            words = " ".join(f"word{number}-{turn}-{index}" for index in range(num_words))
            try:
                await self._clients[tenant].chat.completions.create(
                    model=self._demo["model"],
                    messages=[{"role": "user", "content": words}],
                    service_tier=tier,
                    max_completion_tokens=max_tokens,
                    timeout=120,
                )
            except APIError:
                await asyncio.sleep(1)  # refused: that is part of the picture
            await asyncio.sleep(pause_s)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()


async def signed_in(browser: Browser, demo: dict[str, Any], *, width: int, scheme: Any = "light") -> Page:
    context = await browser.new_context(
        base_url=demo["base_url"], viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    page = await context.new_page()
    page.on("console", lambda message: message.type == "error" and print(f"console: {message.text}"))  # noqa: T201
    await page.goto("/operator/live")
    await page.get_by_label("Login").fill(demo["admin"]["username"])
    await page.get_by_label("Password").fill(demo["admin"]["password"])
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("heading", name="worker-1").wait_for()
    await page.reload()  # without the word of welcome
    await page.get_by_role("heading", name="worker-1").wait_for()
    return page


async def photograph(page: Page, where: Path, **options: Any) -> None:
    await page.screenshot(path=where, **options)
    await asyncio.to_thread(_make_small, where)


def _make_small(where: Path) -> None:
    """With the colours of a drawing rather than of a photo. Raises SystemExit when it is still too large."""
    with Image.open(where) as picture:
        picture.convert("RGB").quantize(colors=NUM_COLOURS).save(where, optimize=True)
    size = where.stat().st_size
    print(f"{where.name}: {size // 1_000} kB")  # noqa: T201
    if size > MOST_BYTES:
        raise SystemExit(f"{where.name} has {size} bytes; at most {MOST_BYTES} belong into the tree")


async def board(browser: Browser, demo: dict[str, Any], out: Path, seconds: float, *, also: bool) -> None:
    traffic = Traffic(demo)
    page = await signed_in(browser, demo, width=1280)
    traffic.start("bulk", "batch", num_at_once=160, num_words=150, max_tokens=400)
    await asyncio.sleep(seconds / 3)
    traffic.start("nova", "default", num_at_once=24, num_words=60, max_tokens=120, pause_s=0.2)
    traffic.start("aurora", "interactive", num_at_once=10, num_words=60, max_tokens=60, pause_s=1.0)
    await asyncio.sleep(seconds * 2 / 3)
    await photograph(page, out / "board-flood.png", full_page=True)
    if also:
        await _more_of_the_board(browser, demo, page, out)
    await traffic.stop()


async def _more_of_the_board(browser: Browser, demo: dict[str, Any], page: Page, out: Path) -> None:
    await page.locator(".lane-plot g[data-response] rect").last.dispatch_event("click")
    await page.get_by_role("dialog").get_by_text("Waits by cause").wait_for()
    await photograph(page, out / "board-explain.png")
    for width, scheme in ((1280, "dark"), (390, "light"), (390, "dark")):
        other = await signed_in(browser, demo, width=width, scheme=scheme)
        await asyncio.sleep(8)
        await photograph(other, out / f"board-{width}-{scheme}.png", full_page=True)
        wide = await other.evaluate("document.documentElement.scrollWidth")
        print(f"{width} px, {scheme}: the page is {wide} px wide")  # noqa: T201
        await other.context.close()


async def pages(browser: Browser, demo: dict[str, Any], out: Path) -> None:
    """What a tenant and an operator see first, each as large as a laptop's window."""
    page = await signed_in(browser, demo, width=1280)
    await page.goto("/console/aurora/playground")
    await page.locator("#send").click()
    await (
        page.get_by_role("status")
        .filter(has_text="Complete")
        .or_(page.get_by_role("status").filter(has_text="Cut at"))
        .wait_for(timeout=60_000)
    )
    await photograph(page, out / "page-playground.png")
    await page.goto("/console/aurora/alerts")
    for measure, amount in (("money", "80"), ("tokens", "1000000")):
        await page.get_by_label("Class").select_option("interactive")
        await page.get_by_label("Counted in").select_option(measure)
        await page.get_by_label("Amount").fill(amount)
        await page.get_by_role("button", name="Draw it").click()
    for name, address in PAGES.items():
        await page.goto(address)
        await page.wait_for_timeout(500)
        await photograph(page, out / f"page-{name}.png")
    await page.context.close()


async def preview(browser: Browser, demo: dict[str, Any], out: Path) -> None:
    """The desk: batch may take a tenth of the slots, and what that would have meant for what was recorded."""
    page = await signed_in(browser, demo, width=1280)
    await page.goto("/operator/policy/classes")
    await page.locator("input[name*='cap_slots_percent']").last.fill("10")
    await page.get_by_role("button", name="See what this does").click()
    await page.get_by_role("button", name="Replay the hour").click()
    await page.get_by_role("cell", name="this edit").first.wait_for(timeout=PREVIEW_LIMIT_MS)
    await photograph(page, out / "policy-preview.png", full_page=True)


async def main(out: Path, seconds: float, *, also: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="rubato-pictures-") as data:
        async with product(Path(data)) as demo, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            await board(browser, demo, out, seconds, also=also)
            await pages(browser, demo, out)
            await preview(browser, demo, out)
            await browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--seconds", type=float, default=25, help="of the flood before the board is photographed (25)")
    parser.add_argument("--also", action="store_true", help="also the account of a request, dark, and 390 px")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(given.out.resolve(), given.seconds, also=given.also))
