"""What a test plays on the live page's stage, and what it reads off the page."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from playwright.sync_api import Page

from scheduler_engine.policy import PriorityClass
from wire.messages import HISTOGRAM_BOUNDS_MS, BoardRow, ClassSnapshot, Histogram

INTERACTIVE, DEFAULT, BATCH = PriorityClass


def row(response_id: str, priority_class: PriorityClass, state: str, tenant_id: str = "bulk") -> BoardRow:
    return BoardRow(
        response_id=response_id,
        tenant_id=tenant_id,
        priority_class=priority_class,
        state=state,
        num_blocks=20,
        num_computed_tokens=300,
        num_output_tokens=44,
    )


def classes(stage: Any, priority_class: PriorityClass, **changes: Any) -> tuple[ClassSnapshot, ...]:
    return tuple(
        replace(each, **changes) if each.priority_class is priority_class else each for each in stage.now.classes
    )


def histogram(count: int, bound_ms: int) -> Histogram:
    return Histogram(counts=tuple(count if bound == bound_ms else 0 for bound in (*HISTOGRAM_BOUNDS_MS, 0)), sum_us=0)


def cells_of(page: Page, table: str, name: str) -> Any:
    return page.locator(f"table.{table}").get_by_role("row", name=re.compile(name)).get_by_role("cell")
