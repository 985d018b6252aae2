"""What every page for people costs with much behind it: ``python -m benchmarks.pages``.

Makes a PostgreSQL and a Valkey of its own, fills them (``page_world``) and visits every page that the URL configuration
has (``page_list``): server time, queries, and bytes with the files that a first visit loads. Takes minutes and some GB
of disk; with ``--data`` what was filled is kept, so that it can be measured again. Next to the time stands the CPU that
this process took, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import logging
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from posixpath import dirname, normpath
from typing import Any

from benchmarks.books import database
from benchmarks.figures import machine, quantiles_ms, report, say
from benchmarks.page_world import PERSON, build, examples, largest, live, valkey

LIMITS = {"p50": 200.0, "queries": 12, "kb": 150.0}  # what the pages are held to
ELSEWHERE = {302, 403, 405}  # leads on, is nobody's, or is asked with a POST alone
_LINKED = re.compile(r'(?:src|href)="(/static/[^"]+)"')
_IMPORTED = re.compile(r'(?:from|import)\s*\(?"(\.[^"]+)"')


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="ended requests; half of them one tenant's")
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--live", type=int, default=10_000, help="requests that are live just now")
    parser.add_argument("--things", type=int, default=200, help="keys, members, batches … of the one tenant")
    parser.add_argument("--visits", type=int, default=20, help="of each page")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="fill it, or take what was filled there before")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    if min(found.rows, found.tenants, found.live, found.things, found.visits) < 1:
        parser.error("every number is at least 1")
    with _folder(found.data) as folder, valkey(folder / "valkey"), database(folder / "postgres"):
        if largest() is None:
            build(found.rows, found.tenants, found.things)
        figures = asyncio.run(_visit_all(found))
    if not found.json:
        sys.stdout.write(table(figures["pages"]) + "\n")
    report({name: value for name, value in figures.items() if found.json or name != "pages"}, as_json=found.json)
    return 0


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="rubato-pages-") as name:
            yield Path(name)
    else:
        given.mkdir(parents=True, exist_ok=True)
        yield given


class Queries:
    """Every query of every connection that is opened from now on, whichever thread opens it."""

    def __init__(self) -> None:
        from django.db.backends.signals import connection_created

        self.seen: list[str] = []
        connection_created.connect(self._equip, weak=False)

    def _equip(self, connection: Any, **_: Any) -> None:
        if self._note not in connection.execute_wrappers:
            connection.execute_wrappers.append(self._note)

    def _note(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.seen.append(sql)
        return execute(sql, params, many, context)


async def _visit_all(asked: argparse.Namespace) -> dict[str, Any]:
    from asgiref.sync import sync_to_async
    from django.conf import settings
    from django.contrib.auth import get_user_model
    from django.test import AsyncClient

    from benchmarks.page_list import addresses

    settings.ALLOWED_HOSTS = ["*"]
    logging.getLogger("django.request").setLevel(logging.ERROR)  # some addresses are no pages, and say so
    queries = Queries()  # before a thread opens its connection
    tenant = await sync_to_async(largest)()
    paths = await sync_to_async(lambda: addresses(examples(tenant)))()
    stranger, member, sizes = AsyncClient(), AsyncClient(), dict[str, int]()
    await member.aforce_login(await get_user_model().objects.aget(username=PERSON))
    pages: dict[str, dict[str, Any]] = {}
    elsewhere = []
    async with live(asked.live, str(tenant.pk)):
        for name, path in paths.items():
            client = stranger if name.startswith("account_") else member
            page = await _visit(client, path, asked.visits, sizes, queries)
            if page is None:
                elsewhere.append(name)
            else:
                pages[name] = page
                say(f"{name}: {page}")
    missed = [name for name, page in pages.items() if any(page[limit] > most for limit, most in LIMITS.items())]
    size = {"rows": asked.rows, "tenants": asked.tenants, "live": asked.live, "things": asked.things}
    told = {"missed": missed, "no_pages": elsewhere, "num_pages": len(pages)}
    return {"pages": pages, **told, "limits": LIMITS, **size, **machine()}


async def _visit(client: Any, path: str, visits: int, sizes: dict[str, int], queries: Queries) -> dict[str, Any] | None:
    """One page, several times; the first visit opens what is opened once. None for what is no page."""
    took: list[float] = []
    began_cpu_s = time.process_time()
    for _ in range(visits + 1):
        queries.seen.clear()
        began = time.perf_counter()
        answer = await client.get(path, headers={"accept-encoding": "gzip"})
        took.append(time.perf_counter() - began)
        if answer.status_code in ELSEWHERE or not answer.headers.get("Content-Type", "").startswith("text/html"):
            return None
    cpu_ms = 1_000 * (time.process_time() - began_cpu_s) / (visits + 1)
    if answer.status_code != 200:
        raise RuntimeError(f"{path} was answered {answer.status_code}")
    found: dict[str, Any] = {**quantiles_ms(took[1:]), "cpu_ms": round(cpu_ms, 1)}
    page = len(answer.content)
    loaded = page + sum([await _size(client, link, sizes) for link in set(_LINKED.findall(_text(answer)))])
    return {**found, "queries": len(queries.seen), "page_kb": round(page / 1_000, 1), "kb": round(loaded / 1_000, 1)}


def _text(answer: Any) -> str:
    packed = answer.headers.get("Content-Encoding") == "gzip"
    return (gzip.decompress(answer.content) if packed else answer.content).decode()


async def _size(client: Any, path: str, sizes: dict[str, int]) -> int:
    """Bytes of a file of ours, with the modules that it imports."""
    if path in sizes:
        return sizes[path]
    sizes[path] = 0  # modules may import each other
    answer = await client.get(path, headers={"accept-encoding": "gzip"})
    total = len(answer.content)
    if path.endswith(".js"):
        for name in set(_IMPORTED.findall(_text(answer))):
            total += await _size(client, normpath(f"{dirname(path)}/{name}"), sizes)
    sizes[path] = total
    return total


def table(pages: dict[str, dict[str, Any]]) -> str:
    """A line a page; a star behind what misses its limit."""
    lines = [f"{'page':<44}{'p50 ms':>10}{'p99 ms':>10}{'CPU ms':>9}{'queries':>9}{'page kB':>10}{'kB in all':>11}"]
    for name, page in pages.items():
        marks = {column: "*" if page[column] > LIMITS.get(column, float("inf")) else " " for column in page}
        cells = [f"{page[column]}{marks[column]}" for column in ("p50", "p99", "cpu_ms", "queries", "page_kb", "kb")]
        lines.append(f"{name:<44}{cells[0]:>10}{cells[1]:>10}{cells[2]:>9}{cells[3]:>9}{cells[4]:>10}{cells[5]:>11}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
