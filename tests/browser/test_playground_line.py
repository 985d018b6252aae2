"""The playground's line is ready before Send is pressed, and no harm comes of one that is never used."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tenants.roles import Role
from tests.browser.product import Product, join

# Says on the root element how many sockets were made, how many are open and how much was heard (a page that allows no
# eval can be asked for that). What the numbered ones are told while they are in ``deaf`` is lost without a word.
COUNTED = """
const Real = WebSocket;
const made = (window.made = []);
window.deaf = new Set();
let heard = 0;
function say() {
  const open = made.filter((one) => one.readyState === Real.OPEN).length;
  Object.assign(document.documentElement.dataset, { made: made.length, open, heard });
}
document.addEventListener("DOMContentLoaded", say);
window.WebSocket = class extends Real {
  constructor(...given) {
    super(...given);
    this.number = made.push(this) - 1;
    for (const kind of ["open", "close"]) super.addEventListener(kind, say);
  }
  addEventListener(kind, hear) {
    super.addEventListener(kind, (event) => {
      if (window.deaf.has(this.number)) return;
      hear(event);
      heard += 1;
      say();
    });
  }
};
"""


@pytest.fixture
def site(product: Product) -> str:
    product.begin_again()
    return product.base_url


@pytest.fixture
def asking(page: Page, site: str) -> Page:
    """Aurora's owner in front of the form."""
    join(page.context, site, "aurora", Role.OWNER)
    page.add_init_script(COUNTED)
    page.clock.install()
    page.goto("/console/aurora/playground")
    return page


def says(page: Page, what: str, number: int) -> None:
    """``made`` or ``open``: of sockets."""
    expect(page.locator("html")).to_have_attribute(f"data-{what}", str(number))


def begin_to_type(page: Page) -> None:
    page.get_by_label("Prompt").fill("Hi")
    says(page, "open", 1)


def send(page: Page) -> None:
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_contain_text("Complete")


def test_who_only_looks_at_the_page_holds_no_line(asking: Page) -> None:
    expect(asking.get_by_role("status")).to_have_text("Nothing asked yet.")
    says(asking, "made", 0)


def test_what_is_typed_goes_out_over_a_line_that_was_open_before(asking: Page, product: Product) -> None:
    begin_to_type(asking)
    expect(asking.get_by_role("status")).to_have_text("Nothing asked yet.")
    asked: list[str] = []
    asking.on("request", lambda request: asked.append(request.url))
    send(asking)

    assert asked == []
    says(asking, "made", 1)
    assert len(product.worker.submits) == 1


def test_a_second_question_has_a_line_of_its_own(asking: Page, product: Product) -> None:
    begin_to_type(asking)
    send(asking)
    says(asking, "open", 0)
    begin_to_type(asking)
    says(asking, "made", 2)
    send(asking)

    says(asking, "made", 2)
    assert len(product.worker.submits) == 2


def test_a_line_that_nobody_uses_is_closed_after_a_minute(asking: Page) -> None:
    begin_to_type(asking)
    for _ in range(9):
        before = asking.locator("html").get_attribute("data-heard") or ""
        asking.clock.run_for(6_000)
        expect(asking.locator("html")).not_to_have_attribute("data-heard", before)  # it was asked, and is alive
    says(asking, "open", 1)
    asking.clock.run_for(12_000)
    says(asking, "open", 0)

    expect(asking.get_by_role("status")).to_have_text("Nothing asked yet.")
    send(asking)
    says(asking, "made", 2)


def test_a_line_that_fell_silent_while_it_was_kept_is_not_trusted(asking: Page, product: Product) -> None:
    begin_to_type(asking)
    asking.evaluate("window.deaf.add(0)")
    asking.clock.fast_forward(8_000)
    send(asking)

    says(asking, "made", 2)
    assert len(product.worker.submits) == 1


def test_a_kept_line_that_the_gateway_closes_is_no_news(asking: Page) -> None:
    begin_to_type(asking)
    asking.evaluate("window.made[0].close()")
    says(asking, "open", 0)
    expect(asking.get_by_role("status")).to_have_text("Nothing asked yet.")
    expect(asking.get_by_role("alert")).to_have_count(0)
    send(asking)
    says(asking, "made", 2)


def test_another_project_is_asked_over_another_line(asking: Page) -> None:
    begin_to_type(asking)
    asking.get_by_label("Counted on the project").dispatch_event("change")
    says(asking, "open", 0)
    send(asking)
    says(asking, "made", 2)
