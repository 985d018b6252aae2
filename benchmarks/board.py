"""What the operator's board costs at 256 running requests and 1,000 tenants, in the gateway and in the browser.

    python -m benchmarks.board [--seconds 10]

The gateway's part: CPU time of decoding seven snapshots a second, reading them twenty times, making and encoding
frames. The browser's part: the page's own files in Chromium, fed with those frames; the share of frames that came
late, beside an empty page on the same machine in the same minute. Then the running product: how long after a step the
page shows it, how long the playground's first token is behind the API's, and how long after a click on Pause a class
still lets calls in. Prints JSON; asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mimetypes
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import django
from django.template.loader import render_to_string
from playwright.async_api import Page, Route, WebSocketRoute, async_playwright

from benchmarks import board_running
from gateway.console.board import LiveBoard
from gateway.console.feed import LiveFeed
from scheduler_engine.policy import PriorityClass
from wire.codec import decode_load, encode_load
from wire.snapshots import (
    EMPTY_HISTOGRAM,
    HISTOGRAM_BOUNDS_MS,
    BoardRow,
    ClassSnapshot,
    Histogram,
    LoadSnapshot,
    TenantSnapshot,
)

STATIC = Path(__file__).parents[1] / "platform" / "gateway" / "console" / "static"
NUM_RUNNING, NUM_TENANTS, STEPS_PER_S, LOADS_PER_S = 256, 1_000, 30, 7
READS_PER_S = 20
ORIGIN = "http://board.test"
LATE_MS = 50
STATES = ("decode", "decode", "decode", "held", "decode", "prefill")


def snapshot(number: int) -> LoadSnapshot:
    """The ``number``-th: every request a few tokens further, a tenth of them new, states that change."""
    rows = tuple(
        BoardRow(
            response_id=f"01a22a1f-b0e9-7732-8111-{(number // 10 if index % 10 == 0 else 0) * 1_000 + index:012}",
            tenant_id=f"{index % NUM_TENANTS:036}",
            priority_class=PriorityClass(index % 3),
            state=STATES[(index + number // 3) % len(STATES)],
            num_blocks=20,
            num_computed_tokens=300 + number * STEPS_PER_S // LOADS_PER_S,
            num_output_tokens=44 + number * STEPS_PER_S // LOADS_PER_S,
        )
        for index in range(NUM_RUNNING)
    )
    counted = Histogram(counts=(number,) * (len(HISTOGRAM_BOUNDS_MS) + 1), sum_us=number)
    classes = tuple(_class(priority_class, counted, number) for priority_class in PriorityClass)
    tenants = tuple(
        TenantSnapshot(tenant_id=f"{index:036}", gpu_us=(number * index, 0, number), weight=1, num_live=1)
        for index in range(NUM_TENANTS)
    )
    return LoadSnapshot(
        worker_id="worker-1",
        epoch=1,
        model="bench",
        ready=True,
        draining=False,
        max_model_len=8_192,
        last_step_age_us=10_000,
        step=number * STEPS_PER_S // LOADS_PER_S,
        num_blocks=50_000,
        num_free_blocks=25_000 + number % 1_000,
        num_host_blocks=32_768,
        num_free_host_blocks=20_000,
        num_slots=NUM_RUNNING,
        num_free_slots=0,
        policy_version=1,
        prompt_tokens_total=number * 10_000,
        output_tokens_total=number * 2_000,
        busy_us_total=number * 240_000,
        classes=classes,
        board=rows,
        tenants=tenants,
    )


def _class(priority_class: PriorityClass, counted: Histogram, number: int) -> ClassSnapshot:
    return ClassSnapshot(
        priority_class=priority_class,
        num_waiting=number % 100,
        num_running=85,
        num_suspended=2,
        waiting_gpu_us=1,
        estimated_start_q50_us=1,
        estimated_start_q90_us=1,
        closed=False,
        retry_after_us=None,
        prompt_tokens=number * 3_000,
        output_tokens=number * 700,
        queue_wait=counted,
        ttft=counted,
        tpot=counted,
        duration=EMPTY_HISTOGRAM,
        ttft_target_us=300_000,
        preemptions=(("hold", "step_time", number),),
        shed=(("late", number),),
    )


async def gateway_cpu(seconds: float) -> dict[str, Any]:
    """Share of one core while somebody looks, for time that does not pass: all work of ``seconds`` at once."""
    bodies = [encode_load(snapshot(number)) for number in range(1, int(seconds * LOADS_PER_S) + 1)]
    now_us, latest = 0, [decode_load(bodies[0])]

    async def read() -> Any:
        return latest

    async def sleep(_: float) -> None:
        return None

    feed = LiveFeed(read, lambda: now_us, sleep)
    number, num_frames, size = 0, 0, 0
    began = time.process_time()
    for tick in range(int(seconds * READS_PER_S)):
        now_us = tick * 1_000_000 // READS_PER_S
        if tick * LOADS_PER_S // READS_PER_S != (tick - 1) * LOADS_PER_S // READS_PER_S:
            latest = [decode_load(bodies[min(tick * LOADS_PER_S // READS_PER_S, len(bodies) - 1)])]
            number, text = await feed.frame_after(number)
            num_frames, size = num_frames + 1, len(text)
    used_s = time.process_time() - began
    return {
        "core_percent": round(100 * used_s / seconds, 2),
        "frames_per_s": round(num_frames / seconds, 1),
        "frame_bytes": size,
        "snapshot_bytes": len(bodies[-1]),
    }


def frames(seconds: float) -> list[str]:
    board, texts = LiveBoard(), []
    for number in range(1, int(seconds * LOADS_PER_S) + 1):
        now_us = number * 1_000_000 // LOADS_PER_S
        board.hear([replace(snapshot(number), tenants=snapshot(number).tenants[:50])], now_us)
        texts.append(json.dumps(board.frame(now_us)))
    return texts


async def serve(route: Route) -> None:
    path = route.request.url.removeprefix(ORIGIN)
    if path == "/operator/live":
        context = {"classes": [each.label for each in PriorityClass], "tenants": {}, "tables": [], "may_drain": False}
        await route.fulfill(body=render_to_string("operator/live.html", context), content_type="text/html")
    elif path.startswith("/static/"):
        file = STATIC / path.removeprefix("/static/")
        await route.fulfill(path=file, content_type=mimetypes.guess_type(file.name)[0])
    else:
        await route.fulfill(body="<p>nothing", content_type="text/html")


COUNT_FRAMES = """(ms) => new Promise((resolve) => {
  const gaps = []; let last = performance.now(); const end = last + ms;
  const tick = (now) => { gaps.push(now - last); last = now; now < end ? requestAnimationFrame(tick) : resolve(gaps); };
  requestAnimationFrame(tick);
})"""


async def measured(page: Page, seconds: float) -> dict[str, Any]:
    gaps = sorted((await page.evaluate(COUNT_FRAMES, seconds * 1_000))[1:])
    return {
        "frames_per_s": round(len(gaps) * 1_000 / sum(gaps), 1),
        "late_percent": round(100 * sum(gap > LATE_MS for gap in gaps) / len(gaps), 2),
        "p99_ms": round(gaps[len(gaps) * 99 // 100], 1),
    }


async def browser_frames(seconds: float) -> dict[str, Any]:
    texts = frames(seconds * 2 + 45)

    def feed(socket: WebSocketRoute) -> None:
        async def play() -> None:
            for text in texts:
                socket.send(text)
                await asyncio.sleep(1 / LOADS_PER_S)

        tasks.append(asyncio.create_task(play()))

    tasks: list[asyncio.Task[None]] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        await page.route("**/*", serve)
        await page.route_web_socket("**/operator/live/stream", feed)
        await page.goto(f"{ORIGIN}/empty")
        empty = await measured(page, seconds)
        await page.goto(f"{ORIGIN}/operator/live")
        await page.wait_for_timeout(32_000)  # until the lanes are full
        full = await measured(page, seconds)
        is_painted = await page.locator(".lane-canvas").is_visible()
        for task in tasks:
            task.cancel()
        await browser.close()
    return {"empty_page": empty, "board": {**full, "is_painted": is_painted}}


async def main(seconds: float) -> None:
    found = {
        "running": NUM_RUNNING,
        "tenants": NUM_TENANTS,
        "gateway": await gateway_cpu(seconds),
        "browser": await browser_frames(seconds),
        "running_product": await board_running.measured(seconds),
    }
    print(json.dumps(found, indent=1))  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gateway.settings")
    django.setup()
    asyncio.run(main(parser.parse_args().seconds))
