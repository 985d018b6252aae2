"""Edits that fitted when made and not what is in force when they are due; acts that come too late."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import OperationalError
from django.utils import timezone

from tenants import proposals, selectors, services
from tenants.models import AuditEvent, PolicyProposal, QuotaPolicy

SOON = timedelta(hours=1)

pytestmark = pytest.mark.usefixtures("operators")


@dataclass(frozen=True)
class Pair:
    """Two edits of one class, or of Aurora's default cell: each fits by itself, and both together do not."""

    one: tuple[str, str, int]  # (class or "cell", field, value)
    other: tuple[str, str, int]
    sentence: str


PAIRS = {
    "floors": Pair(("batch", "floor_percent", 60), ("default", "floor_percent", 60), "must sum to at most 100"),
    "chunks": Pair(("batch", "chunk_min", 600), ("batch", "chunk_max", 500), "chunk_min <= chunk_max"),
    "budget": Pair(
        ("batch", "chunk_max", 1_800), ("batch", "token_budget_max", 1_700), "chunk_max <= token_budget_max"
    ),
    "governor": Pair(
        ("batch", "governor_off_percent", 4), ("batch", "governor_on_percent", 3), "must be at most governor_on_percent"
    ),
    "answer": Pair(
        ("cell", "default_max_tokens", 900), ("cell", "max_tokens_cap", 800), "default max tokens must not lie above"
    ),
}
every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def policy() -> tuple[int, dict[str, Any]]:
    found = selectors.current_policy()
    assert found is not None
    return found.version, copy.deepcopy(found.policy)


def value_of(place: str, field: str) -> Any:
    document = policy()[1]
    cells = {row["priority_class"]: row for row in document["tenants"]}
    return (cells["default"] if place == "cell" else document["classes"][place])[field]


def drafted(place: str, field: str, value: Any, *, actor: str = "ann") -> PolicyProposal:
    version, document = policy()
    cells = {row["priority_class"]: row for row in document["tenants"]}
    (cells["default"] if place == "cell" else document["classes"][place])[field] = value
    return proposals.draft(actor=actor, document=document, based_on=version)


def sent(proposal: PolicyProposal, wait: timedelta | None = None) -> PolicyProposal:
    moment = None if wait is None else timezone.now() + wait
    return proposals.send_off(actor="ann", proposal_id=proposal.id, reason="they pay more", effective_from=moment)


def due() -> list[PolicyProposal]:
    return proposals.apply_due(timezone.now() + 2 * SOON)


@every_pair
def test_a_due_edit_that_does_not_fit_any_more_ends_and_says_so_and_the_others_come_into_force(
    aurora: Any, pair: Pair
) -> None:
    first = sent(drafted(*pair.one), SOON)
    second = sent(drafted("batch", "bypass_limit", 77), SOON * 1.5)
    sent(drafted(*pair.other))
    assert [(one.id, one.state) for one in due()] == [(first.id, "conflict"), (second.id, "applied")]
    first.refresh_from_db()
    assert first.outcome.startswith("it does not fit what is in force: ")
    assert pair.sentence in first.outcome
    assert (value_of(*pair.other[:2]), value_of("batch", "bypass_limit")) == (pair.other[2], 77)
    event = AuditEvent.objects.filter(object_id=str(first.id)).latest("id")
    assert (event.after["state"], event.after["outcome"]) == ("conflict", first.outcome)
    assert due() == []


@every_pair
@pytest.mark.parametrize("act", ["send", "approve", "release"])
def test_what_is_refused_for_it_does_not_fit_has_changed_nothing_and_never_comes_by_itself(
    aurora: Any, pair: Pair, act: str, settings: Any
) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = act != "send"
    proposal, before = drafted(*pair.one), value_of(*pair.other[:2])
    if act != "send":
        sent(proposal)
    settings.RUBATO_POLICY_NEEDS_APPROVAL = False
    sent(drafted(*pair.other))
    acts: dict[str, Callable[[], object]] = {
        "send": lambda: sent(proposal),
        "approve": lambda: proposals.approve(actor="bob", proposal_id=proposal.id),
        "release": lambda: proposals.release(actor="bob", proposal_id=proposal.id),
    }
    stood = PolicyProposal.objects.filter(id=proposal.id).values().get()
    assert pair.sentence in proposals.misfit(PolicyProposal(**stood))
    version = policy()[0]
    with pytest.raises(ValidationError, match=pair.sentence):
        acts[act]()
    assert (PolicyProposal.objects.filter(id=proposal.id).values().get(), policy()[0]) == (stood, version)
    sent(drafted(*pair.other[:2], before))
    assert due() == []
    assert value_of(*pair.one[:2]) != pair.one[2]
    assert proposals.misfit(PolicyProposal(**stood)) == ""


@every_pair
def test_an_edit_that_cannot_be_in_itself_is_no_draft(aurora: Any, pair: Pair) -> None:
    sent(drafted(*pair.other))
    with pytest.raises(ValidationError, match=pair.sentence):
        drafted(*pair.one)
    assert not PolicyProposal.objects.filter(state="draft").exists()


def test_a_fault_of_ours_ends_the_one_edit_that_meets_it(aurora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sent(drafted("batch", "bypass_limit", 76), SOON)
    second = sent(drafted("batch", "max_preemptions", 7), SOON * 1.5)
    write, calls = services.write_rows, []

    def faulty(**rows: Any) -> None:
        calls.append(rows)
        write(**rows)
        if len(calls) == 1:
            raise LookupError

    monkeypatch.setattr(services, "write_rows", faulty)
    assert [(one.id, one.state) for one in due()] == [(first.id, "conflict"), (second.id, "applied")]
    first.refresh_from_db()
    assert "a fault of the platform kept it from being made (LookupError)" in first.outcome
    assert (value_of("batch", "bypass_limit") != 76, value_of("batch", "max_preemptions")) == (True, 7)
    assert due() == []


def test_while_the_database_is_away_nothing_ends(aurora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proposal = sent(drafted("batch", "bypass_limit", 76), SOON)

    def away(**rows: Any) -> None:
        raise OperationalError

    with monkeypatch.context() as patched:
        patched.setattr(services, "write_rows", away)
        with pytest.raises(OperationalError):
            due()
    assert [one.id for one in due()] == [proposal.id]
    assert value_of("batch", "bypass_limit") == 76


def _draft() -> PolicyProposal:
    return drafted("cell", "weight", 7)


def _waiting() -> PolicyProposal:
    return sent(_draft(), SOON)


def _applied() -> PolicyProposal:
    return sent(_draft())


def _withdrawn() -> PolicyProposal:
    return proposals.withdraw(actor="bob", proposal_id=_draft().id)


def _conflict() -> PolicyProposal:
    proposal = _draft()
    sent(drafted("cell", "weight", 9))
    return sent(proposal)


def _approved() -> PolicyProposal:
    proposal = _waiting()
    PolicyProposal.objects.filter(id=proposal.id).update(needs_approval=True, approved_by="carl")
    return proposal


STATES: dict[str, Callable[[], PolicyProposal]] = {
    "draft": _draft,
    "waiting": _waiting,
    "approved": _approved,
    "applied": _applied,
    "withdrawn": _withdrawn,
    "conflict": _conflict,
}
TOO_LATE = [
    *(("send", state) for state in STATES if state != "draft"),
    *(("approve", state) for state in STATES),
    *(("release", state) for state in STATES),
    ("withdraw", "applied"),
    ("withdraw", "withdrawn"),
]
SAID = {
    "draft": "has not been sent off yet",
    "waiting": "sent off already|needs no approval|for its moment",
    "approved": "sent off already|carl has approved this edit already|for its moment",
    "applied": "has come into force already: version",
    "withdrawn": "has been withdrawn already, by bob",
    "conflict": "cannot come into force any more: edited by somebody else since: Aurora, default: weight",
}


@pytest.mark.parametrize(("act", "state"), TOO_LATE, ids=[f"{act}-{state}" for act, state in TOO_LATE])
def test_an_act_that_comes_too_late_changes_nothing_and_says_what_became_of_the_edit(
    aurora: Any, act: str, state: str
) -> None:
    proposal = STATES[state]()
    stood, version = PolicyProposal.objects.filter(id=proposal.id).values().get(), policy()[0]
    acts: dict[str, Callable[..., object]] = {
        "send": lambda **of: proposals.send_off(reason="they pay more", **of | {"actor": "ann"}),
        "approve": proposals.approve,
        "release": proposals.release,
        "withdraw": proposals.withdraw,
    }
    with pytest.raises(ValidationError, match=SAID[state]):
        acts[act](actor="bob", proposal_id=proposal.id)
    assert (PolicyProposal.objects.filter(id=proposal.id).values().get(), policy()[0]) == (stood, version)


@pytest.mark.parametrize("state", ["draft", "waiting", "approved", "conflict"])
def test_what_is_not_in_force_may_be_withdrawn(aurora: Any, state: str) -> None:
    weights = set(QuotaPolicy.objects.values_list("weight", flat=True))
    proposal = STATES[state]()
    assert proposals.withdraw(actor="bob", proposal_id=proposal.id).outcome == "by bob"
    assert due() == []
    assert set(QuotaPolicy.objects.values_list("weight", flat=True)) - weights <= {9}
