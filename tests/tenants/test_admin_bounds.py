"""Numbers the engine would refuse: each row says the range at the field, and nothing is saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.test import Client

from tenants import selectors
from tenants import services as tenants
from tenants.models import QuotaPolicy

DAYS_7 = 7 * 24 * 3_600_000

BAD_CELLS = [
    ("weight", 2_000_000, "at least 1 and at most 1000000"),
    ("weight", 10**10, "at least 1 and at most 1000000"),
    ("requests_per_minute", 10**16, f"at least 0 and at most {10**15}, or empty"),
    ("tokens_per_minute", 2**63 - 1, f"at least 0 and at most {10**15}, or empty"),
    ("tokens_per_minute", 10**30, f"at least 0 and at most {10**15}, or empty"),  # no row could hold it
    ("concurrency", -1, f"at least 0 and at most {10**15}, or empty"),
    ("money_micros", 10**17, f"at least 0 and at most {10**15}, or empty"),
    ("hard_deadline_ms", 10**15, f"at least 1 and at most {DAYS_7}, or empty"),
    ("max_tokens_cap", 10**16, f"at least 0 and at most {10**15}, or empty"),
    ("max_tokens_cap", 100, "the default is 512"),
    ("value_micros", 10**18, f"at least 0 and at most {10**15}"),
    ("default_max_tokens", 10**16, f"at least 1 and at most {2**31 - 1}"),
]
BAD_CLASSES = [
    ("ttft_target_ms", 10**15, f"at least 1 and at most {DAYS_7}, or empty"),
    ("tbt_target_ms", 0, f"at least 1 and at most {DAYS_7}, or empty"),
    ("max_queue_wait_ms", 10**15, f"at least 0 and at most {DAYS_7}, or empty"),
    ("floor_percent", -1, "at least 0 and at most 100"),
    ("cap_slots_percent", 0, "at least 1 and at most 100"),
    ("cap_memory_percent", 0, "at least 1 and at most 100"),
    ("patience_steps", 10**9, "at least 0 and at most 1000000, or empty"),
    ("patience_ms", 10**12, f"at least 0 and at most {DAYS_7}, or empty"),
    ("fairness_gap_ms", 0, f"at least 1 and at most {DAYS_7}"),
    ("quantum_steps", 10**9, "and at most 1000000"),
    ("token_budget_max", 2 * 10**9, "at least 1 and at most 1000000"),
    ("bypass_limit", 10**9, "at least 0 and at most 1000000"),
    ("max_preemptions", 10**9, "at least 0 and at most 1000000"),
]


@pytest.fixture
def operator(db: None, published: Any) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("alice", password="x"))
    return client


@pytest.mark.parametrize(("name", "value", "words"), BAD_CELLS)
def test_a_cell_out_of_bounds_is_an_error_at_its_field(aurora: Any, name: str, value: int, words: str) -> None:
    before = selectors.current_policy()
    cell = QuotaPolicy.objects.get(tenant=aurora.tenant, priority_class="default")
    policy = replace(selectors.tenant_class_policy(cell), **{name: value})
    with pytest.raises(ValidationError) as refusal:
        tenants.save_quota(actor="alice", policy=policy)
    ((field, (sentence,)),) = refusal.value.message_dict.items()
    assert field == name
    assert words in sentence
    assert selectors.current_policy() == before


@pytest.mark.parametrize(("name", "value", "words"), BAD_CLASSES)
def test_a_class_parameter_out_of_bounds_is_an_error_at_its_field(
    aurora: Any, name: str, value: int, words: str
) -> None:
    before = selectors.current_policy()
    policy = replace(selectors.live_snapshot(0).classes[1], **{name: value})
    with pytest.raises(ValidationError) as refusal:
        tenants.save_class(actor="alice", policy=policy)
    assert words in refusal.value.message_dict[name][0]
    assert selectors.current_policy() == before


def test_the_widest_allowed_cell_is_saved(aurora: Any) -> None:
    cell = QuotaPolicy.objects.get(tenant=aurora.tenant, priority_class="default")
    tenants.save_quota(actor="alice", policy=replace(selectors.tenant_class_policy(cell), weight=1_000_000))
    assert QuotaPolicy.objects.get(pk=cell.pk).weight == 1_000_000
