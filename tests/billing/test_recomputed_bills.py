"""A bill computed again from nothing but its own lines: tokens x prices and the rounding that it names."""

from __future__ import annotations

import csv
import io
import random
import re
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import Sum

from billing import documents, ledger, services, statements
from billing.models import LedgerEntry, Price, Statement
from billing.pricing import Terminal, TokenCounts, TokenPrices
from billing.statement_lines import lines_of
from tenants.models import CLASS_LABELS, Tenant
from tests.billing.conftest import MODEL

LATER = datetime(2100, 1, 1, tzinfo=UTC)
MILLION = 1_000_000
UNPRICED = "a model that no list prices"
PLACES = ("project_id", "key_id", "priority_class", "model", "price_version")


def whole(rng: random.Random) -> TokenCounts:
    """A prompt, some of it found cached, and what was generated, of all choices."""
    prompt = rng.randrange(1, 3_000)
    return TokenCounts(prompt, rng.choice([0, rng.randrange(prompt)]), rng.choice([1, 7, 997]) * rng.randrange(1, 4))


def prefill(rng: random.Random) -> TokenCounts:
    return TokenCounts(rng.randrange(1, 3_000))


def nothing(rng: random.Random) -> TokenCounts:
    return TokenCounts()


# docs/billing.md, "What is charged", row by row: how it ended, what a worker says it computed, whether that is charged
TABLE: list[tuple[Terminal, Callable[[random.Random], TokenCounts], bool]] = [
    (Terminal.COMPLETED, whole, True),
    *((cancelled, nothing, False) for cancelled in (Terminal.CANCELLED_CLIENT, Terminal.CANCELLED_ADMIN)),
    *((cancelled, prefill, True) for cancelled in (Terminal.CANCELLED_CLIENT, Terminal.CANCELLED_ADMIN)),
    *((cancelled, whole, True) for cancelled in (Terminal.CANCELLED_CLIENT, Terminal.CANCELLED_ADMIN)),
    (Terminal.SHED, nothing, False),
    *((ended, counts, False) for ended in (Terminal.EXPIRED, Terminal.FAILED_PLATFORM) for counts in (nothing, whole)),
]


class Bill:
    """A day of random calls under price lists that change meanwhile, and what each line of its bill must sum up to."""

    def __init__(self, world: Any, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self.tenant = Tenant.objects.create(id=world.aurora, slug="aurora", name="Aurora", timezone="Europe/Vienna")
        self.tokens: dict[tuple[Any, ...], Counter[str]] = {}
        versions = [0, world.price_version]
        messages: list[Any] = []
        for number in range(150):
            if rng.random() < 0.05:
                versions.append(services.set_prices(actor="tests", prices=self._prices()).version)
            place = {
                "project_id": uuid.UUID(int=rng.randrange(1, 3)),
                "key_id": rng.choice([None, uuid.UUID(int=7)]),
                "priority_class": rng.choice(list(CLASS_LABELS)),
                "model": rng.choice([MODEL, MODEL, MODEL, UNPRICED]),
                "price_version": rng.choice(versions[-3:]),
            }
            messages.append(world.reserve(number, money_micros=10**12, **place))
            if rng.random() < 0.1:
                messages.append(world.release(number))  # no worker counted anything
            else:
                messages.append(self._end(world, number, place))
        rng.shuffle(messages)
        for start in range(0, len(messages), 50):
            ledger.apply(messages[start : start + 50])

    def _end(self, world: Any, number: int, place: dict[str, Any]) -> Any:
        terminal, counted, is_charged = self._rng.choice(TABLE)
        counts = counted(self._rng)
        names = PLACES if is_charged else PLACES[:-1]
        row = self.tokens.setdefault((is_charged, *(place[name] for name in names)), Counter())
        row.update(
            num_requests=1, prompt_tokens=counts.prompt, cached_tokens=counts.cached, output_tokens=counts.output
        )
        return world.usage(number, terminal=terminal, counts=counts, **place)

    def _prices(self) -> dict[tuple[str, str], TokenPrices]:
        prices = (0, 1, 37_501, 150_000, 999_999, 12_000_000)
        return {
            (MODEL, label): TokenPrices(**{kind: self._rng.choice(prices) for kind in ("prompt", "cached", "output")})
            for label in self._rng.sample(list(CLASS_LABELS), 2)
        }

    def statement(self) -> Statement:
        (made,) = statements.close_due_days(LATER)
        return made


@pytest.fixture(params=range(6))
def bill(world: Any, request: pytest.FixtureRequest) -> Bill:
    return Bill(world, request.param)


def amount(line: dict[str, str]) -> int:
    """Of a charged row of the CSV, from what stands in it: in micro-units."""
    tokens = {name: int(line[f"{name}_tokens"]) for name in ("prompt", "cached", "output")}
    prices = {name: int(line[f"price_{name}"]) for name in ("prompt", "cached", "output")}
    exact = (
        (tokens["prompt"] - tokens["cached"]) * prices["prompt"]
        + tokens["cached"] * prices["cached"]
        + tokens["output"] * prices["output"]
    )
    rounding = int(line["rounding_picos"])
    assert 0 <= rounding < int(line["num_requests"]) * MILLION
    micros, rest = divmod(exact + rounding, MILLION)
    assert rest == 0
    return micros


def test_every_line_s_money_follows_from_its_tokens_and_prices_and_all_sum_up_to_the_ledger(bill: Bill) -> None:
    rows = list(csv.DictReader(io.StringIO(documents.statement_csv(bill.statement()))))
    used = [row for row in rows if row["kind"] == "usage"]
    assert [amount(row) for row in used] == [int(row["cost_micros"]) for row in used]
    charged = LedgerEntry.objects.filter(kind="settle").aggregate(sum=Sum("amount_micros"))["sum"]
    assert sum(amount(row) for row in used) == charged == int(rows[-1]["cost_micros"])


def test_prices_of_a_line_are_those_of_the_list_it_names(bill: Bill) -> None:
    for line in bill.statement().lines:
        if line["price_version"] is not None:
            named = (line["price_prompt"], line["price_cached"], line["price_output"])
            assert named == listed(line["price_version"], line["model"], line["priority_class"])


def listed(version: int, model: str, label: str) -> tuple[int, ...]:
    kinds = Price.objects.filter(price_version=version, model=model, priority_class=label)
    found = dict(kinds.values_list("token_kind", "micros_per_million"))
    return tuple(found.get(kind, 0) for kind in ("prompt", "cached", "output"))


def test_a_charged_line_holds_the_tokens_that_were_charged_and_no_others(bill: Bill) -> None:
    found: dict[tuple[Any, ...], Counter[str]] = {}
    for line in bill.statement().lines:
        place = (uuid.UUID(line["project_id"]), uuid.UUID(line["key_id"]) if line["key_id"] else None)
        version = [line["price_version"]] if line["is_charged"] else []
        names = ("num_requests", "prompt_tokens", "cached_tokens", "output_tokens")
        where = (line["is_charged"], *place, line["priority_class"], line["model"], *version)
        found[where] = Counter({name: line[name] for name in names})
        assert line["is_charged"] or line["cost_micros"] == 0
    assert found == bill.tokens


def test_what_was_not_charged_is_marked_as_such_on_paper(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reportlab.rl_config.pageCompression", 0)
    Tenant.objects.create(id=world.aurora, slug="aurora", name="Aurora")
    stopped = world.usage(2, terminal=Terminal.EXPIRED, counts=TokenCounts(500, 100, 145))
    ledger.apply([world.reserve(1), world.usage(1), world.reserve(2), stopped])
    (made,) = statements.close_due_days(LATER)
    page = documents.statement_pdf(made, tenant_name="Aurora").decode("latin-1")
    words = re.findall(r"\((.*?)\) Tj", page)
    charged, uncharged = words.index("0.000027"), words.index("not charged")
    assert words[charged - 6 : charged] == ["1", "100", "0", "20", str(world.price_version), "0.000000000000"]
    assert words[uncharged - 4 : uncharged] == ["1", "500", "100", "145"]
    assert words[words.index("0.150000") :][:3] == ["0.150000", "0.075000", "0.600000"]


def test_a_statement_of_before_stays_as_it_was_written_and_says_what_its_lines_do_not_tell(world: Any) -> None:
    tenant = Tenant.objects.create(id=world.aurora, slug="aurora", name="Aurora")
    line = {
        **{"project_id": "p", "project": "main", "key_id": "", "key": "", "priority_class": "default", "model": "m"},
        **{"num_requests": 1, "prompt_tokens": 2, "cached_tokens": 0, "output_tokens": 3, "cost_micros": 9},
    }
    made = Statement(tenant=tenant, lines=[line], corrections=[], total_micros=9)
    row = next(csv.DictReader(io.StringIO(documents.statement_csv(made))))
    assert (row["kind"], row["cost_micros"], row["price_version"], row["rounding_picos"]) == ("usage", "9", "", "")
    assert not documents.tells_apart(made)


def test_many_price_lists_of_one_day_are_read_by_one_query(world: Any, django_assert_num_queries: Any) -> None:
    bill = Bill(world, 1)
    day = statements.open_day(bill.tenant)
    assert day is not None
    entries = LedgerEntry.objects.filter(created_at__lt=day.ends_at + timedelta(days=1))
    with django_assert_num_queries(4):
        lines = lines_of(bill.tenant.id, entries)
    assert len({line.price_version for line in lines}) > 4
