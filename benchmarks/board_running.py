"""How old the board and the playground are, on the running product: imported by ``benchmarks.board``.

A step's moment is read off the worker's own record (its clock is the machine's monotonic one), the moment that it is
shown from the page. Board: for every step, the time until the page first shows that step or a later one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, InternalServerError, PermissionDeniedError
from playwright.async_api import Browser, Page, async_playwright

from benchmarks.pictures import Traffic, product, signed_in
from gpu_worker.replay.record_log import Boot, Stepped, log_files
from gpu_worker.replay.rerun import entries_of

NUM_AT_ONCE = 48
NUM_FIRST_TOKENS = 20
NUM_PAUSES = 10
PAUSE_CALL_S = 0.02
PROMPT = "Why is the sky blue?"
WATCH_STEPS = """() => {
  window.steps = [];
  const field = document.querySelector("[data-field=step]");
  new MutationObserver(() => requestAnimationFrame(() => {
    window.steps.push([performance.timeOrigin + performance.now(), Number(field.textContent.replaceAll(",", ""))]);
  })).observe(field, { childList: true, characterData: true, subtree: true });
}"""
FIRST_TEXT = """() => new Promise((resolve) => {
  const box = document.getElementById("answer"), began = performance.now();
  const watched = new MutationObserver(() => {
    if (!box.textContent) return;
    watched.disconnect();
    resolve(performance.now() - began);
  });
  watched.observe(box, { childList: true, characterData: true, subtree: true });
  document.getElementById("send").click();
})"""


async def measured(seconds: float) -> dict[str, Any]:
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # or every call of the client is a line above the figures
    with tempfile.TemporaryDirectory(prefix="rubato-board-") as folder:
        async with product(Path(folder)) as demo, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            first_tokens = await _first_tokens(browser, demo)
            pauses = await _pauses(browser, demo)
            shown = await _shown_steps(browser, demo, seconds)  # last: its last step is the last of the record
            await browser.close()
        return {"board_behind_a_step": _behind(shown, Path(folder) / "recorded"), **first_tokens, **pauses}


async def _shown_steps(browser: Browser, demo: dict[str, Any], seconds: float) -> list[tuple[float, int]]:
    """(Unix milliseconds, step) whenever the page showed another one."""
    page, traffic = await signed_in(browser, demo, width=1280), Traffic(demo)
    traffic.start("bulk", "batch", num_at_once=NUM_AT_ONCE, num_words=60, max_tokens=400)
    await asyncio.sleep(3)
    await page.evaluate(WATCH_STEPS)
    await asyncio.sleep(seconds)
    await traffic.stop()
    await asyncio.sleep(3)  # all has ended, and the last step is shown
    shown: list[tuple[float, int]] = await page.evaluate("window.steps")
    await page.close()
    return shown


def _behind(shown: list[tuple[float, int]], recorded: Path) -> dict[str, Any]:
    """Milliseconds. A page that shows step n has seen n of them applied."""
    unix_minus_monotonic_ms = (time.time() - time.monotonic()) * 1_000
    applied_ms: dict[int, float] = {}
    num_applied = 0
    for entry in entries_of(log_files(recorded)):
        if isinstance(entry, Boot):
            num_applied = entry.step
        elif isinstance(entry, Stepped):
            num_applied += 1
            applied_ms[num_applied] = entry.applied_us / 1_000 + unix_minus_monotonic_ms
    behind: list[float] = []
    for (_, before), (at_ms, step) in itertools.pairwise(shown):
        behind += [at_ms - applied_ms[number] for number in range(before + 1, step + 1)]
    behind.sort()
    return {
        "steps": len(behind),
        "p50_ms": round(statistics.median(behind)),
        "p95_ms": round(behind[len(behind) * 95 // 100]),
        "p99_ms": round(behind[len(behind) * 99 // 100]),
    }


async def _first_tokens(browser: Browser, demo: dict[str, Any]) -> dict[str, Any]:
    """In turn, so that both meet the same machine. The page's clock runs from the click to the text in the page."""
    page = await signed_in(browser, demo, width=1280)
    await page.goto("/console/aurora/playground")
    client = AsyncOpenAI(base_url=demo["base_url"] + "/v1", api_key=demo["keys"]["aurora"], max_retries=0)
    api_ms, page_ms = [], []
    for _ in range(NUM_FIRST_TOKENS):
        api_ms.append(await _api_first_token(client, demo["model"]))
        page_ms.append(await _page_first_token(page))
    await client.close()
    return {
        "first_token_api_p50_ms": round(statistics.median(api_ms), 1),
        "first_token_playground_p50_ms": round(statistics.median(page_ms), 1),
        "playground_behind_api_ms": round(statistics.median(page_ms) - statistics.median(api_ms), 1),
    }


async def _pauses(browser: Browser, demo: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds from the desk's Pause, as the browser sends it, until the last call that is let in is made."""
    page = await signed_in(browser, demo, width=1280)
    client = AsyncOpenAI(base_url=demo["base_url"] + "/v1", api_key=demo["keys"]["bulk"], max_retries=0)
    took_ms: list[float] = []
    sent_at_s: list[float] = []
    page.on("request", lambda request: sent_at_s.append(time.monotonic()) if request.method == "POST" else None)
    for _ in range(NUM_PAUSES):
        await page.goto("/operator/policy/?q=bulk")
        calling = asyncio.create_task(_call_until_refused(client, demo["model"]))
        await asyncio.sleep(0.5)
        await page.get_by_role("button", name="Pause Bulk batch").click()
        last_at_s = await calling
        took_ms.append(max(0.0, (last_at_s - sent_at_s[-1]) * 1_000))
        await page.get_by_role("button", name="Resume Bulk batch").click()
        await page.get_by_role("button", name="Pause Bulk batch").wait_for()
        await asyncio.sleep(1)
    await client.close()
    await page.close()
    return {"pause_in_force_p50_ms": round(statistics.median(took_ms)), "pause_in_force_max_ms": round(max(took_ms))}


async def _call_until_refused(client: AsyncOpenAI, model: str) -> float:
    """A call every few milliseconds; when the last that was let in was made (monotonic seconds)."""
    made_at_s, pending = 0.0, set()
    refused_at_s = asyncio.get_running_loop().create_future()

    async def call() -> None:
        at_s = time.monotonic()
        try:
            await client.responses.create(model=model, input="Hi", max_output_tokens=1, service_tier="flex")
        except (PermissionDeniedError, InternalServerError):  # the second where the worker heard of it first
            if not refused_at_s.done():
                refused_at_s.set_result(at_s)
        else:
            nonlocal made_at_s
            made_at_s = max(made_at_s, at_s)

    while not refused_at_s.done():
        pending.add(asyncio.create_task(call()))
        await asyncio.sleep(PAUSE_CALL_S)
    await asyncio.gather(*pending)
    return made_at_s


async def _api_first_token(client: AsyncOpenAI, model: str) -> float:
    began = time.perf_counter()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_completion_tokens=16,
        service_tier="priority",
        stream=True,
    )
    first_ms = 0.0
    async for chunk in stream:
        if not first_ms and chunk.choices and chunk.choices[0].delta.content:
            first_ms = (time.perf_counter() - began) * 1_000
    return first_ms


async def _page_first_token(page: Page) -> float:
    await page.get_by_label("Prompt").fill(PROMPT)
    await page.get_by_label("Max tokens").fill("16")
    await page.get_by_role("radio", name="interactive").check()
    first_ms: float = await page.evaluate(FIRST_TEXT)
    await page.locator("#send:enabled").wait_for()
    return first_ms
