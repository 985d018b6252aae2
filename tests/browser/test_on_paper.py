"""Every page on paper, also from a browser in the dark: nothing of it is cut off, and it is dark on light."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.browser.test_every_page import CASES, enter, site, things

__all__ = ["site", "things"]  # fixtures
PORTRAIT, LANDSCAPE = {"width": 718, "height": 1047}, {"width": 1047, "height": 718}  # A4 less a centimetre, at 96 dpi
WIDE = ("/operator/policy/", "/console/aurora/statements/{statement}")  # as print.css has it
CUT = """() => [...document.querySelectorAll("main *")]
  .filter((one) => one.checkVisibility() && one.clientWidth && !one.closest(".visually-hidden"))
  .filter((one) => getComputedStyle(one).overflowX !== "visible" && one.scrollWidth > one.clientWidth)
  .map((one) => one.outerHTML.slice(0, 90))"""
LINES = """(cell) => {
  const words = document.createRange();
  words.selectNodeContents(cell);
  return words.getClientRects().length;
}"""
PALE = """() => [...document.querySelectorAll("main *")]
  .filter((one) => one.checkVisibility() && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .filter((one) => getComputedStyle(one).printColorAdjust !== "exact")
  .filter((one) => Math.max(...getComputedStyle(one).color.match(/[0-9.]+/g).slice(0, 3)) > 200)
  .map((one) => one.outerHTML.slice(0, 90))"""


@pytest.mark.parametrize(("role", "path"), CASES)
def test_a_page_on_paper_is_whole_and_dark_on_light(
    page: Page, site: str, things: dict[str, Any], role: str, path: str
) -> None:
    enter(page, site, role)
    paper = LANDSCAPE if path in WIDE else PORTRAIT
    page.set_viewport_size(paper)
    page.emulate_media(media="print", color_scheme="dark")
    page.goto(path.format(**things))
    assert page.evaluate(CUT) == []
    assert page.evaluate(PALE) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= paper["width"]


def test_on_a_statement_on_paper_a_class_keeps_its_word_whole(page: Page, site: str, things: dict[str, Any]) -> None:
    enter(page, site, "owner")
    page.set_viewport_size(LANDSCAPE)
    page.emulate_media(media="print")
    page.goto(f"/console/aurora/statements/{things['statement']}")
    word = page.get_by_role("region", name="Lines").get_by_role("cell", name="interactive", exact=True)
    assert word.evaluate(LINES) == 1
