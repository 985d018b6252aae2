"""The quota matrix under somebody's hands: what was typed stays until it is saved or given up, and a phone suffices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from playwright.sync_api import Browser, Locator, Page, expect

from billing import services as billing_services
from billing.pricing import TokenPrices
from tenants import services
from tenants.models import PolicyProposal, QuotaPolicy

NOWHERE = "redis://127.0.0.1:1/0"
LONG = "Universitätsklinikum Schleswig-Holstein, Campus Kiel"


@pytest.fixture
def desk(operator: Page) -> Page:
    User.objects.filter(username="ops").update(is_superuser=True)
    for slug, name in (("aurora", "Aurora"), ("clinic", LONG)):
        services.create_tenant(actor="tests", slug=slug, name=name)
    operator.goto("/operator/policy/")
    return operator


def typed(page: Page) -> Locator:
    box = page.get_by_label("Aurora default: concurrency")
    box.fill("77")
    return box


def test_an_emergency_pause_leaves_what_was_typed_where_it_is(desk: Page) -> None:
    box = typed(desk)
    desk.get_by_role("button", name="Pause Aurora default").click()
    expect(desk.get_by_text("Aurora, default: paused.")).to_be_visible()
    assert not QuotaPolicy.objects.get(tenant__slug="aurora", priority_class="default").allowed
    desk.get_by_role("button", name="Resume Aurora default").click()
    expect(desk.get_by_text("Aurora, default: resumed.")).to_be_visible()
    expect(box).to_have_value("77")
    desk.get_by_role("button", name="See what this does").click()
    expect(desk.get_by_role("row", name="Aurora, default concurrency no limit 77")).to_be_visible()
    expect(desk.locator("main tbody tr")).to_have_count(1)


def test_a_page_with_something_typed_is_not_left_without_a_question(desk: Page) -> None:
    asked: list[str] = []

    def stay(dialog: Any) -> None:
        asked.append(dialog.type)
        dialog.dismiss()

    desk.on("dialog", stay)
    box = typed(desk)
    desk.get_by_label("Tenant", exact=True).fill("clinic")
    desk.get_by_role("button", name="Find").click()
    expect(box).to_have_value("77")
    assert asked == ["beforeunload"]
    box.press("Enter")  # saved, so nothing is asked
    expect(desk.get_by_role("heading", name="An edit of version")).to_be_visible()
    assert asked == ["beforeunload"]


@pytest.mark.parametrize("button", ["Put it in force", "Send it for approval", "Approve", "Withdraw"])
def test_a_double_click_on_what_becomes_of_an_edit_ends_with_what_became_of_it(
    desk: Page, button: str, settings: Any
) -> None:
    settings.REDIS_URL = NOWHERE
    settings.RUBATO_POLICY_NEEDS_APPROVAL = button != "Put it in force"
    typed(desk)
    desk.get_by_role("button", name="See what this does").dblclick()
    desk.get_by_label("Why", exact=True).fill("they asked")
    if button in ("Approve", "Withdraw"):
        desk.get_by_role("button", name="Send it for approval").click()
        expect(desk.get_by_text("The edit waits for somebody else's approval.")).to_be_visible()
        PolicyProposal.objects.update(created_by="somebody else")
        desk.reload()
    desk.get_by_role("button", name=button).dblclick()
    said = {"Send it for approval": "The edit waits for", "Withdraw": "The edit is withdrawn."}
    expect(desk.get_by_text(said.get(button, "Saved: version 3."))).to_be_visible()
    expect(desk.get_by_text("already")).to_have_count(0)
    assert PolicyProposal.objects.count() == 1


def form_with(desk: Page, form: str, text: str) -> None:
    """The first number of a form, with something in it that is not saved."""
    prices = {("m", "batch"): TokenPrices(prompt=1, cached=2, output=3)}
    billing_services.set_prices(actor="tests", prices=prices)
    desk.goto(f"/operator/policy/{form}")
    desk.locator(".matrix input[type=text]").first.fill(text)


@pytest.mark.parametrize("form", ["", "classes", "prices"])
def test_every_form_that_edits_asks_before_what_was_typed_is_lost(desk: Page, form: str) -> None:
    form_with(desk, form, "77")
    with desk.expect_event("dialog") as asked:
        desk.on("dialog", lambda dialog: dialog.dismiss())
        desk.get_by_role("link", name="History").click()
    assert asked.value.type == "beforeunload"
    expect(desk.locator(".matrix input[type=text]").first).to_have_value("77")


def test_a_page_where_nothing_was_typed_is_left_without_one(desk: Page) -> None:
    desk.on("dialog", lambda dialog: pytest.fail(dialog.type))
    desk.get_by_role("link", name="History").click()
    expect(desk.get_by_role("heading", name="History", exact=True)).to_be_visible()


def test_what_was_typed_outlives_the_sign_in(desk: Page, site: str) -> None:
    box = typed(desk)
    desk.context.clear_cookies()
    desk.get_by_role("button", name="See what this does").click()
    expect(desk.get_by_role("alert")).to_contain_text("You are no longer signed in; what you typed is still here.")
    expect(box).to_have_value("77")
    client = Client()
    client.force_login(User.objects.get(username="ops"))
    desk.context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": site}])
    desk.get_by_role("button", name="See what this does").click()
    expect(desk.get_by_role("heading", name="An edit of version")).to_be_visible()
    assert PolicyProposal.objects.count() == 1


def cut_off(page: Page) -> None:
    """This page alone: its visitor's other one must have nothing to complain of."""
    page.route("**/*", lambda route: route.abort())


def desk_answers(**answer: Any) -> Callable[[Page], None]:
    return lambda page: page.route("**/operator/policy/", lambda route: route.fulfill(**answer))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (desk_answers(status=503), "The platform answers with an error (503)"),
        (desk_answers(status=500), "The platform answers with an error (500)"),
        (desk_answers(status=403), "You may not edit this any more"),
        (desk_answers(body="<p>No tenant"), "There is nothing to edit here any more"),
        (cut_off, "The platform does not answer"),
    ],
    ids=["503", "500", "403", "no form", "offline"],
)
def test_what_keeps_an_edit_from_being_sent_is_said_as_it_is_and_nothing_typed_is_lost(
    desk: Page, fault: Callable[[Page], None], words: str
) -> None:
    page = frail(desk)
    box = typed(page)
    fault(page)
    page.get_by_role("button", name="See what this does").click()
    expect(page.get_by_role("alert")).to_contain_text(f"{words}; what you typed is still here.")
    expect(box).to_have_value("77")
    page.unroute_all()
    page.get_by_role("button", name="See what this does").click()
    expect(page.get_by_role("heading", name="An edit of version")).to_be_visible()
    page.close()


def test_the_reason_of_an_edit_outlives_the_sign_in_and_the_button_that_was_pressed_counts(
    desk: Page, site: str
) -> None:
    typed(desk)
    desk.get_by_role("button", name="See what this does").click()
    desk.get_by_label("Why", exact=True).fill("nights are quiet")
    desk.context.clear_cookies()
    desk.get_by_role("button", name="Put it in force").click()
    expect(desk.get_by_text("You are no longer signed in; what you typed is still here.")).to_be_visible()
    expect(desk.get_by_label("Why", exact=True)).to_have_value("nights are quiet")
    client = Client()
    client.force_login(User.objects.get(username="ops"))
    desk.context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": site}])
    desk.get_by_role("button", name="Put it in force").click()
    expect(desk.get_by_role("heading", name="applied")).to_be_visible()
    assert PolicyProposal.objects.get().reason == "nights are quiet"


@pytest.mark.parametrize("width", [320, 375, 768])
def test_a_tenant_with_a_long_name_leaves_room_for_its_numbers(desk: Page, width: int) -> None:
    desk.set_viewport_size({"width": width, "height": 740})
    matrix = desk.get_by_role("region", name="Quota matrix")
    heads = matrix.locator("tbody th")
    widest = max(box["width"] for head in heads.all() if (box := head.bounding_box()))
    assert widest < width / 2
    assert desk.get_by_text(LONG).first.get_attribute("title") == LONG
    assert desk.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [320, 375])
def test_the_history_fits_a_phone(desk: Page, width: int) -> None:
    desk.set_viewport_size({"width": width, "height": 740})
    desk.goto("/operator/policy/history")
    assert desk.evaluate("document.documentElement.scrollWidth") <= width


def frail(desk: Page, address: str = "/operator/policy/") -> Page:
    """A page of the same visitor whose browser may complain: what fails is on it."""
    opened = desk.context.new_page()
    opened.goto(address)
    return opened


def sign_in_changed(page: Page, site: str) -> None:
    page.context.add_cookies([{"name": "csrftoken", "value": "x" * 32, "url": site}])


def network_gone(page: Page, site: str) -> None:
    cut_off(page)


def gateway_broken(page: Page, site: str) -> None:
    page.route("**/pause/**", lambda route: route.fulfill(status=500))


def gateway_silent(page: Page, site: str) -> None:
    button = page.get_by_role("button", name="Pause Aurora default")
    button.evaluate("""it => it.setAttribute("hx-request", '{"timeout": 100}')""")
    page.route("**/pause/**", lambda route: None)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (sign_in_changed, "Not paused: it was refused; perhaps somebody has signed in or out"),
        (network_gone, "Not paused, as far as this page knows: the gateway does not answer"),
        (gateway_broken, "Not paused: the gateway answered with an error (500)"),
        (gateway_silent, "Not paused, as far as this page knows: the gateway does not answer"),
    ],
)
def test_a_pause_that_failed_says_so_where_one_sees_it(desk: Page, site: str, fault: Any, words: str) -> None:
    page = frail(desk)
    page.set_viewport_size({"width": 900, "height": 300})
    fault(page, site)
    button = page.get_by_role("button", name="Pause Aurora default")
    button.click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text(words)
    expect(alert).to_contain_text("Load the page again.")
    expect(alert).to_be_in_viewport()
    expect(button).to_be_visible()
    assert QuotaPolicy.objects.get(tenant__slug="aurora", priority_class="default").allowed
    page.close()


def test_what_failed_is_said_until_the_same_succeeds(desk: Page) -> None:
    page = frail(desk)
    cut_off(page)
    page.get_by_role("button", name="Pause Aurora default").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.unroute_all()
    page.get_by_role("button", name="Pause Universit").click()
    expect(page.get_by_role("button", name="Resume Universit")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_role("button", name="Pause Aurora default").click()
    expect(page.get_by_role("button", name="Resume Aurora default")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.close()


def test_a_replay_that_cannot_be_asked_for_says_so(desk: Page, site: str) -> None:
    typed(desk)
    desk.get_by_role("button", name="See what this does").click()
    expect(desk.get_by_role("heading", name="An edit of version")).to_be_visible()
    page = frail(desk, desk.url)
    sign_in_changed(page, site)
    page.get_by_role("button", name="Replay the hour").click()
    expect(page.get_by_role("alert").filter(has_text="Not done: it was refused")).to_be_in_viewport()
    page.close()


@pytest.mark.parametrize("form", ["", "classes", "prices"])
def test_what_a_refusal_has_kept_is_not_lost_without_a_question(desk: Page, form: str) -> None:
    form_with(desk, form, "many")
    desk.get_by_role("button", name="See what this does").click()
    expect(desk.get_by_text("Nothing was saved.")).to_be_visible()
    with desk.expect_event("dialog") as asked:
        desk.on("dialog", lambda dialog: dialog.dismiss())
        desk.get_by_role("link", name="History").click()
    assert asked.value.type == "beforeunload"
    expect(desk.locator(".matrix input[type=text]").first).to_have_value("many")


def test_a_moment_that_is_typed_in_utc_is_told_in_the_viewers_own_zone(browser: Browser, site: str, desk: Page) -> None:
    typed(desk)
    desk.get_by_role("button", name="See what this does").click()
    expect(desk.get_by_role("heading", name="An edit of version")).to_be_visible()
    far = browser.new_context(base_url=site, timezone_id="Asia/Kathmandu", storage_state=desk.context.storage_state())
    page = far.new_page()
    page.goto(desk.url)
    page.get_by_label("From (UTC)").fill("2100-01-01T20:30")
    expect(page.get_by_text("that is 2100-01-02 02:15 GMT+5:45")).to_be_visible()
    page.get_by_label("From (UTC)").fill("")
    expect(page.get_by_text("that is")).to_have_count(0)
    far.close()
