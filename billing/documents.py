"""Statements and usage as files: CSV, NDJSON, CloudEvents, PDF. Pure rendering; refuses to query."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, time
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings

from billing import paper
from billing.models import Statement, UsageRequest

CONSOLE = "the console"  # in place of a key's name
EVENT_TYPE = "rubato.usage.v1"
_LINE = (
    *("project", "key", "priority_class", "model", "num_requests", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("price_version", "price_prompt", "price_cached", "price_output", "rounding_picos", "cost_micros"),
)
_HEADINGS = (
    *("Project", "Key", "Class", "Model"),
    *("Requests", "Prompt tokens", "of them cached", "Output tokens", "Price list"),
)
NOT_CHARGED = "not charged"  # in place of an amount
RECOMPUTED = (
    "The amount of a line is its tokens at the prices of its list, and what was added by rounding every request up to a"
    " millionth. What was used and not charged stands in lines of its own."
)
NOT_TOLD_APART = (
    "This statement is of a version that did not tell apart what was not charged: tokens of its lines may hold it."
)
_USAGE = (
    *("id", "project_id", "key_id", "priority_class", "model", "source", "state", "reason", "prompt_tokens"),
    *("cached_tokens", "output_tokens", "cost_micros", "price_version", "queue_us", "ttft_us", "total_us", "gpu_us"),
    *("num_preemptions", "recomputed_tokens", "reserved_at", "ended_at", "requested_class", "is_charged"),
)


def money(micros: int) -> str:
    """Micro-units as a decimal number of whole units, exactly: ``-1234567`` is ``-1.234567``."""
    sign, amount = "-" if micros < 0 else "", abs(micros)
    return f"{sign}{amount // 1_000_000}.{amount % 1_000_000:06d}"


def begins_before_its_day(statement: Statement) -> bool:
    """Days without entries have no statement: the next one holds their time too."""
    zone = ZoneInfo(statement.zone)
    return statement.starts_at < datetime.combine(statement.day, time(), tzinfo=zone)


def statement_csv(statement: Statement) -> str:
    """One row a line, then a row a correction, then the total. Amounts in micro-units: what stands in the ledger. The
    kind of a line is ``usage``, or ``uncharged`` for what was used and not charged.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["day", "kind", *_LINE, "reason"])
    for line in statement.lines:
        kind = "usage" if is_charged(line) else "uncharged"
        writer.writerow([statement.day, kind, *(plain(value) for value in _values_of(line)), ""])
    for one in statement.corrections:
        blanks = [""] * (len(_LINE) - 1)
        writer.writerow([statement.day, one["kind"], *blanks, owed_micros(one), plain(one["reason"])])
    writer.writerow([statement.day, "total", *[""] * (len(_LINE) - 1), statement.total_micros, ""])
    return out.getvalue()


def owed_micros(correction: Mapping[str, Any]) -> int:
    """What a statement's correction adds to its total: a credit takes away."""
    amount = int(correction["amount_micros"])
    return -amount if correction["kind"] == "credit" else amount


def key_of(line: Mapping[str, Any]) -> str:
    """What a statement's line calls its key: calls from the console's own pages have none."""
    return str(line["key"] or "unknown") if line["key_id"] else CONSOLE


def is_charged(line: Mapping[str, Any]) -> bool:
    """Whether the price list was applied to a statement's line. Lines of statements that did not tell say it was."""
    return bool(line.get("is_charged", True))


def tells_apart(statement: Statement) -> bool:
    """Whether what was not charged stands in lines of its own. A statement stays as its day's version wrote it."""
    return all("is_charged" in line for line in statement.lines)


def prices_of(statement: Statement) -> list[tuple[int, str, str, int, int, int]]:
    """The prices that its lines were charged at: (list, class, model, prompt, cached, output), in that order."""
    names = ("price_version", "priority_class", "model", "price_prompt", "price_cached", "price_output")
    charged = (line for line in statement.lines if line.get("price_version") is not None)
    return sorted({tuple(line[name] for name in names) for line in charged})


def rounding(line: Mapping[str, Any]) -> str:
    """What rounding added to a statement's line, in whole units, exactly; nothing where nothing was charged."""
    picos = line.get("rounding_picos")
    if picos is None or not is_charged(line):
        return ""
    micros, rest = divmod(picos, 1_000_000)
    return f"{money(micros)}{rest:06d}"


def cost(line: Mapping[str, Any]) -> str:
    """What a statement's line says in place of its amount, in whole units."""
    return money(line["cost_micros"]) if is_charged(line) else NOT_CHARGED


def _values_of(line: Mapping[str, Any]) -> list[Any]:
    return [key_of(line) if name == "key" else line.get(name) for name in _LINE]


def plain(value: object) -> object:
    """A text that a spreadsheet would take for a formula is quoted away (CSV injection)."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def statement_pdf(statement: Statement, *, tenant_name: str) -> bytes:
    """A page or more of A4. The same statement gives the same bytes."""
    title = f"Usage statement {statement.day}"
    starts, ends = (moment.astimezone(UTC).isoformat() for moment in (statement.starts_at, statement.ends_at))
    since = "the day, and all since the statement before it: " if begins_before_its_day(statement) else ""
    currency = settings.RUBATO_CURRENCY.upper()
    tenant = paper.drawable(tenant_name, str(statement.tenant_id))
    story = [
        paper.heading(title),
        paper.line(f"{tenant} · {statement.zone} · {since}from {starts} to {ends}"),
        paper.line(f"All amounts are in {currency}. A day has its statement once it is over."),
        paper.gap(),
        paper.table(
            [*_HEADINGS, f"Rounding ({currency})", f"Cost ({currency})"],
            [_on_paper(line) for line in statement.lines],
            texts=(3, 4, 2, 3),
        ),
        paper.gap(),
    ]
    if prices := prices_of(statement):
        rows = [
            [str(version), label, paper.drawable(model, ""), *(money(micros) for micros in kinds)]
            for version, label, model, *kinds in prices
        ]
        kinds = [f"{kind} ({currency} a million tokens)" for kind in ("Prompt", "Cached", "Output")]
        story += [paper.table(["Price list", "Class", "Model", *kinds], rows, texts=(1, 1, 3)), paper.gap()]
    story += [paper.line(RECOMPUTED if tells_apart(statement) else NOT_TOLD_APART), paper.gap()]
    if statement.corrections:
        rows = [
            [one["kind"], paper.drawable(one["reason"], one["operation_id"]), money(owed_micros(one))]
            for one in statement.corrections
        ]
        story += [
            paper.table(["Correction", "Why", f"Adds to the total ({currency})"], rows, texts=(1, 5)),
            paper.gap(),
        ]
    sums = {
        "Charged": statement.charged_micros,
        "Adjusted": statement.adjusted_micros,
        "Credited": statement.credited_micros,
        "Total": statement.total_micros,
    }
    headings = [f"{name} ({currency})" for name in sums]
    story.append(paper.table(headings, [[money(micros) for micros in sums.values()]], texts=()))
    return paper.document(title, story)


def _on_paper(line: Mapping[str, Any]) -> list[str]:
    counts = [f"{line[name]:,}" for name in ("num_requests", "prompt_tokens", "cached_tokens", "output_tokens")]
    return [
        paper.drawable(line["project"] or "unknown", line["project_id"]),
        paper.drawable(key_of(line), line["key_id"]),
        line["priority_class"],
        paper.drawable(line["model"], ""),
        *counts,
        _text_of(line.get("price_version")),
        rounding(line),
        cost(line),
    ]


def _text_of(number: int | None) -> str:
    return "" if number is None else str(number)


def statement_file(statement: Statement, kind: str, *, tenant_name: str) -> tuple[bytes, str, str]:
    """(body, content type, file name) of a statement as ``csv`` or ``pdf``. Raises ValueError for another kind."""
    name = f"statement-{statement.day}.{kind}"
    if kind == "csv":
        return statement_csv(statement).encode(), "text/csv; charset=utf-8", name
    if kind == "pdf":
        return statement_pdf(statement, tenant_name=tenant_name), "application/pdf", name
    raise ValueError(f"a statement comes as csv or pdf, not {kind}")


def usage_csv(operations: Iterable[UsageRequest]) -> Iterator[str]:
    """Header and one row an operation, as they come."""
    yield _csv_row(_USAGE)
    for operation in operations:
        yield _csv_row([plain(getattr(operation, name)) for name in _USAGE])


def _csv_row(values: Iterable[object]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(values)
    return out.getvalue()


def usage_ndjson(operations: Iterable[UsageRequest]) -> Iterator[str]:
    """One JSON object a line."""
    for operation in operations:
        yield json.dumps(_values(operation)) + "\n"


def usage_cloudevents(operations: Iterable[UsageRequest], *, source: str) -> Iterator[str]:
    """CloudEvents 1.0, one JSON object a line; (source, id) names an operation once and for ever."""
    for operation in operations:
        event = {
            "specversion": "1.0",
            "type": EVENT_TYPE,
            "source": source,
            "id": str(operation.id),
            "subject": str(operation.tenant_id),
            "time": _text(operation.ended_at),
            "datacontenttype": "application/json",
            "data": _values(operation),
        }
        yield json.dumps(event) + "\n"


def _values(operation: UsageRequest) -> dict[str, object]:
    return {name: _text(getattr(operation, name)) for name in _USAGE}


def _text(value: object) -> object:
    """Identifiers and moments as text; numbers and None as they are."""
    if value is None or isinstance(value, int):
        return value
    isoformat = getattr(value, "isoformat", None)
    return isoformat() if isoformat else str(value)
