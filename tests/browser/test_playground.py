"""The playground in a real browser, on the API's own websocket. A console that complains fails the test (``page``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from django.conf import settings
from playwright.sync_api import Browser, Page, expect

from gateway.text import byte_text
from tenants import selectors, services
from tenants.models import QuotaPolicy, Tenant
from tenants.roles import Role
from tests.browser.cable import Cable
from tests.browser.product import Product, join
from tests.gateway.fake_worker import MODEL
from wire.messages import EngineCounters, Reserved
from wire.redis_bus import RedisUsageReader
from wire.redis_keys import Keys

LETTERS = bytes(97 + i % 26 for i in range(150))
CORPUS = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg/onload=window.hit=1>",
    '"><iframe srcdoc="<script>parent.hit=1</script>"></iframe>',
    "<a href='javascript:window.hit=1'>x</a>",
    "<style>body { display: none }</style>",
    "</p></div><h1>out</h1>",
    "<math><mtext></p><img src=x onerror=window.hit=1></mtext></math>",
    "&lt;b&gt; &#x3c;script&#x3e; \u003cb\u003e {{ 7*7 }} ${7*7}",
    "<template><script>window.hit=1</script></template>",
)
# What arrives while ``frozen`` is set is lost without a word, and the socket stays open: a half-open connection.
FREEZER = """
const Real = WebSocket;
window.frozen = false;
window.sockets = 0;
window.WebSocket = class extends Real {
  constructor(...given) { super(...given); window.sockets += 1; this.number = window.sockets; }
  addEventListener(kind, heard) {
    super.addEventListener(kind, (event) => {
      if (!(window.frozen && this.number === 1 && kind !== "open")) heard(event);
    });
  }
};
"""
WATCH = """() => {
  const began = performance.now();
  window.seen = { frames: 0, seconds: 0, longest_ms: 0 };
  new PerformanceObserver((list) => {
    for (const task of list.getEntries()) window.seen.longest_ms = Math.max(window.seen.longest_ms, task.duration);
  }).observe({ type: "longtask" });
  const count = (now) => {
    window.seen.frames += 1;
    window.seen.seconds = (now - began) / 1_000;
    requestAnimationFrame(count);
  };
  requestAnimationFrame(count);
}"""


@pytest.fixture
def site(product: Product) -> str:
    product.begin_again()
    return product.base_url


@pytest.fixture
def owner(page: Page, site: str) -> Page:
    join(page.context, site, "aurora", Role.OWNER)
    return page


@contextmanager
def quota(product: Product, **changes: Any) -> Iterator[None]:
    """Another quota of Aurora's for interactive work, in force at the gateway; afterwards the one before."""
    row = QuotaPolicy.objects.get(tenant__slug="aurora", priority_class="interactive")
    before = selectors.tenant_class_policy(row)
    services.save_quota(actor="tests", policy=replace(before, **changes))
    product.until_policy()
    try:
        yield
    finally:
        services.save_quota(actor="tests", policy=before)
        product.until_policy()


def answer(page: Page) -> str:
    """What stands in the box, a line for each paragraph."""
    return "\n".join(page.locator("#answer p").all_text_contents())


def send(page: Page, prompt: str = "Hi") -> None:
    page.goto("/console/aurora/playground")
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name="Send").click()


def test_an_answer_streams_in_with_its_figures(owner: Page, product: Product) -> None:
    product.worker.script.answer = b"Blue light\nscatters more."
    waits = (("queued", "memory", "batch", 380_000), ("paused", "slots", "interactive", 25_000))
    product.worker.script.counters = EngineCounters(
        queue_us=380_000, ttft_us=412_000, total_us=1_412_000, num_holds=1, waits=waits
    )
    send(owner, "Why blue?")

    expect(owner.get_by_role("status")).to_have_text("Complete: 25 tokens.")
    assert answer(owner) == "Blue light\nscatters more."
    facts = {"tier": "priority", "output": "25", "rate": "24.0"}  # the tier is that of the project's own class
    for name, words in facts.items():
        expect(owner.locator(f'[data-fact="{name}"]')).to_have_text(words)
    expect(owner.locator('[data-fact="ttft"]')).to_contain_text("412 ms")
    expect(owner.locator('[data-fact="cost"]')).to_have_text("0.000039")
    expect(owner.locator("#waits-sum")).to_have_text(
        "It waited 380 ms before it started and was paused for 25 ms after that."
    )
    told = ["380 ms for KV memory held by the batch class", "25 ms for a slot held by the interactive class"]
    expect(owner.locator("#waits-list li")).to_have_text(told)
    expect(owner.get_by_role("button", name="Send")).to_be_enabled()
    expect(owner.get_by_role("button", name="Stop")).to_be_disabled()


def test_what_is_asked_passes_the_same_admission_as_a_call_and_is_told_to_the_books_as_the_consoles(
    owner: Page, product: Product, valkey_url: str
) -> None:  # P04
    send(owner)
    expect(owner.get_by_role("status")).to_contain_text("Complete")
    reader = RedisUsageReader(valkey_url, keys=Keys(settings.RUBATO_REDIS_PREFIX), consumer="test")
    messages = [entry.message for entry in reader.read(1_000, 0.0)]
    reader.close()
    reserved = [message for message in messages if isinstance(message, Reserved)][-1]
    assert (reserved.source, reserved.key_id) == ("console", "")
    assert reserved.tenant_id == str(Tenant.objects.get(slug="aurora").id)
    (submit,) = product.worker.submits
    assert (submit.sampling.temperature, submit.max_tokens) == (0.7, 256)


def test_a_refusal_says_why_and_when_to_come_back(owner: Page, product: Product) -> None:  # P04
    with quota(product, requests_per_minute=0):
        send(owner)

        expect(owner.get_by_role("alert")).to_contain_text("requests")
        assert product.worker.submits == []
        expect(owner.get_by_role("button", name="Send")).to_be_enabled()


def test_stop_ends_it_in_the_engine_and_keeps_what_was_said(owner: Page, product: Product) -> None:
    product.worker.script.answer, product.worker.step_s = LETTERS, 0.02
    send(owner)
    expect(owner.get_by_role("status")).to_have_text("Answering …")
    owner.get_by_role("button", name="Stop").click()

    expect(owner.get_by_role("status")).to_contain_text("Stopped")
    ((_, cancel),) = product.worker.cancels
    assert cancel.reason == "client"
    shown = answer(owner)
    assert shown
    assert LETTERS.decode().startswith(shown)


def test_a_reload_in_the_middle_shows_the_whole_answer_once(owner: Page, product: Product) -> None:  # P67
    product.worker.script.answer, product.worker.step_s = LETTERS, 0.01
    send(owner, "The alphabet, please")
    expect(owner.locator("#answer")).to_have_text(re.compile("^[a-z]{50,}$"))
    owner.reload()

    expect(owner.get_by_role("status")).to_contain_text("Complete")
    assert answer(owner) == LETTERS.decode()
    expect(owner.get_by_label("Prompt")).to_have_value("The alphabet, please")
    assert len(product.worker.submits) == 1
    assert product.worker.cancels == []


@pytest.mark.parametrize("is_signed_out", [True, False], ids=["signed out", "ended by itself"])
def test_what_a_tab_keeps_of_a_question_belongs_to_one_sign_in(
    owner: Page, product: Product, site: str, is_signed_out: bool
) -> None:
    product.worker.script.answer, product.worker.step_s = LETTERS, 0.01
    send(owner, "A secret of the owner")
    expect(owner.locator("#answer")).to_have_text(re.compile("^[a-z]{21,}$"))
    if is_signed_out:
        owner.get_by_role("button", name="Sign out").click()
        expect(owner.get_by_role("link", name="Console")).to_be_visible()
        assert "secret" not in owner.evaluate("JSON.stringify(sessionStorage)")
        owner.go_back()
        expect(owner.get_by_role("button", name="Sign in")).to_be_visible()
    join(owner.context, site, "aurora", Role.DEVELOPER)
    owner.goto("/console/aurora/playground")

    expect(owner.get_by_role("status")).to_have_text("Nothing asked yet.")
    expect(owner.get_by_label("Prompt")).to_have_value("Why is the sky blue?")
    assert answer(owner) == ""
    assert "secret" not in owner.evaluate("JSON.stringify(sessionStorage)")


@pytest.mark.parametrize("temperature", ["0", "0.05", "0.333", "2"])
def test_any_temperature_that_the_api_takes_can_be_asked_for(owner: Page, product: Product, temperature: str) -> None:
    owner.goto("/console/aurora/playground")
    owner.get_by_label("Temperature").fill(temperature)
    owner.get_by_role("button", name="Send").click()
    expect(owner.get_by_role("status")).to_contain_text("Complete")
    (submit,) = product.worker.submits
    assert submit.sampling.temperature == float(temperature)


def test_a_half_open_socket_is_noticed_and_the_answer_goes_on_where_it_was(owner: Page, product: Product) -> None:
    """P69. The clock of the page is moved on instead of waiting for it."""
    owner.add_init_script(FREEZER)
    owner.clock.install()
    product.worker.script.answer, product.worker.step_s = LETTERS, 0.02
    send(owner)
    expect(owner.locator("#answer")).to_have_text(re.compile("^[a-z]{21,}$"))
    owner.evaluate("window.frozen = true")
    before = len(answer(owner))
    owner.clock.fast_forward(6_000)  # says "ping"
    owner.clock.fast_forward(13_000)
    owner.clock.fast_forward(1_000)

    expect(owner.get_by_role("status")).to_contain_text("Complete")
    assert owner.evaluate("window.sockets") == 2
    assert 20 < before < 150
    assert answer(owner) == LETTERS.decode()


def test_a_network_that_goes_away_costs_a_pause_and_no_token(browser: Browser, product: Product, site: str) -> None:
    """P69: as in a tunnel. Nothing is heard for a while, every connection is gone, and none can be made."""
    product.worker.script.answer, product.worker.step_s = LETTERS, 0.01
    with Cable(site) as cable:
        context = browser.new_context(base_url=cable.base_url)
        join(context, cable.base_url, "aurora", Role.OWNER)
        page = context.new_page()
        send(page)
        expect(page.locator("#answer")).to_have_text(re.compile("^[a-z]{21,}$"))
        cable.cut()
        expect(page.get_by_role("status")).to_contain_text("The connection is lost")
        before = len(answer(page))
        cable.mend()
        page.evaluate("window.dispatchEvent(new Event('online'))")
        expect(page.get_by_role("status")).to_contain_text("Complete")
        assert 20 < before < 150
        assert answer(page) == LETTERS.decode()
        assert len(product.worker.submits) == 1
        context.close()


def test_an_answer_becomes_text_and_nothing_else(owner: Page, product: Product) -> None:
    product.worker.script.answer = "\n".join(CORPUS).encode()
    product.worker.script.tokens_per_step = 7
    send(owner)

    expect(owner.get_by_role("status")).to_contain_text("Cut at max tokens")
    owner.get_by_label("Max tokens").fill("2000")
    owner.get_by_role("button", name="Send").click()
    expect(owner.get_by_role("status")).to_contain_text("Complete")
    assert answer(owner) == "\n".join(CORPUS)
    kinds = owner.evaluate("[...document.querySelectorAll('#answer *')].map((node) => node.tagName)")
    assert set(kinds) == {"P"}
    assert owner.evaluate("window.hit") is None


def test_four_hundred_tokens_a_second_are_drawn_once_a_frame(owner: Page, product: Product) -> None:
    product.stream(b"word\n" * 120, tokens_per_s=400)
    owner.goto("/console/aurora/playground")
    owner.evaluate(
        """() => {
          window.draws = window.frames = 0;
          const count = () => { window.frames += 1; requestAnimationFrame(count); };
          requestAnimationFrame(count);
          const watched = { childList: true, characterData: true, subtree: true };
          new MutationObserver(() => { window.draws += 1; }).observe(document.getElementById("answer"), watched);
        }"""
    )
    owner.get_by_label("Max tokens").fill("2000")
    owner.get_by_role("button", name="Send").click()
    expect(owner.get_by_role("status")).to_have_text("Complete: 600 tokens.")
    draws, frames = owner.evaluate("[window.draws, window.frames]")
    assert 1 < draws <= frames + 1
    assert draws < 600 / 2


@pytest.mark.soak
def test_two_minutes_of_four_hundred_tokens_a_second_leave_the_tab_quick_and_small(
    owner: Page, product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product.worker, "max_model_len", 65_536)
    monkeypatch.setitem(product.runtime.door.texts, MODEL, byte_text(context_length=65_536))
    expected = "".join(f"{number:09}\n" for number in range(4_800))
    product.stream(expected.encode(), tokens_per_s=400)
    owner.goto("/console/aurora/playground")
    owner.evaluate(WATCH)
    devtools = owner.context.new_cdp_session(owner)
    devtools.send("Performance.enable")

    def heap() -> float:
        devtools.send("HeapProfiler.collectGarbage")
        found = devtools.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "JSHeapUsedSize"))

    before = heap()
    owner.get_by_label("Max tokens").fill("60000")
    with quota(product, max_tokens_cap=None):
        owner.get_by_role("button", name="Send").click()
        expect(owner.get_by_role("status")).not_to_have_text("Waiting for the first token …")
        expect(owner.get_by_role("alert")).to_be_hidden()
        expect(owner.get_by_role("status")).to_have_text("Complete: 48000 tokens.", timeout=300_000)
    seen, growth_bytes = owner.evaluate("window.seen"), heap() - before
    assert answer(owner) == expected
    assert growth_bytes < 32 * 1_048_576
    assert seen["longest_ms"] <= 200 or seen["frames"] >= 50 * seen["seconds"], seen


def test_only_granted_classes_can_be_picked(page: Page, site: str) -> None:
    join(page.context, site, "nova", Role.DEVELOPER)
    page.goto("/console/nova/playground")
    values = page.locator("[name=tier]").evaluate_all("(found) => found.map((radio) => radio.value)")
    assert values == ["auto", "default"]
    assert page.locator('[data-fact="cost"]').count() == 0  # a developer sees no money


def test_a_prompt_is_sent_by_keyboard(owner: Page) -> None:
    owner.goto("/console/aurora/playground")
    owner.get_by_label("Prompt").press("Control+Enter")
    expect(owner.get_by_role("status")).to_contain_text("Complete")


def test_who_signed_out_elsewhere_is_told(owner: Page) -> None:
    owner.goto("/console/aurora/playground")
    owner.context.clear_cookies(name="sessionid")
    owner.get_by_role("button", name="Send").click()
    expect(owner.get_by_role("alert")).to_contain_text("signed out")
