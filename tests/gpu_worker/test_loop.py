"""One turn after the other: what goes in, what comes out, on the real engine and a virtual clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.clock import VirtualClock
from gpu_worker.loop import WorkerLoop
from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy, gpu_classes
from wire.messages import Cancel, Drain, Explain, Explained, Finished, PolicyChanged, Rejected, Submit, Tokens, Usage


class Session:
    """A loop and everything it ever said."""

    def __init__(self, small_worker: Any, **options: Any) -> None:
        self.clock = VirtualClock()
        self.loop: WorkerLoop = small_worker.loop(self.clock, **options)
        self.said: list[tuple[str, Any]] = []
        self.usages: list[Usage] = []
        self.num_sent: Counter[str] = Counter()

    def take_in(self, *messages: Any) -> None:
        for message in messages:
            self.loop.take_in(message, self.clock.now_us())

    def turn(self) -> bool:
        """One turn; whether it was idle."""
        turn = self.loop.turn()
        self.loop.check_books()
        for gateway_id, messages in turn.output.to_gateways.items():
            self.said.extend((gateway_id, message) for message in messages)
            for message in messages:
                if isinstance(message, Tokens):
                    for response_id, new in zip(message.response_ids, message.token_ids, strict=True):
                        self.num_sent[response_id] += len(new)
        self.usages.extend(turn.output.usages)
        if turn.is_idle and turn.wake_at_us is not None:
            self.clock.sleep_us(max(1, turn.wake_at_us - self.clock.now_us()))
        return turn.is_idle

    def run(self) -> None:
        for _ in range(10_000):
            if not self.loop.has_work:
                return
            self.turn()
        raise AssertionError("the work does not end")

    def text(self, response_id: str) -> str:
        """All tokens sent for the response, each at the index it claims."""
        token_ids: list[int] = []
        for _, message in self.said:
            if isinstance(message, Tokens):
                for name, first, new in zip(
                    message.response_ids, message.first_indexes, message.token_ids, strict=True
                ):
                    if name == response_id:
                        assert first == len(token_ids)
                        token_ids.extend(new)
        return bytes(token_ids).decode()

    def end(self, response_id: str) -> Any:
        (end,) = [
            message
            for _, message in self.said
            if isinstance(message, Finished | Rejected) and message.response_id == response_id
        ]
        return end


@pytest.fixture
def session(small_worker: Any) -> Session:
    return Session(small_worker)


def test_a_request_runs_from_submit_to_usage(session: Session, small_worker: Any) -> None:
    session.take_in(small_worker.submit(max_tokens=6))
    session.run()
    assert len(session.text("r1")) == 6
    (usage,) = session.usages
    assert (usage.terminal, usage.prompt_tokens, usage.output_tokens) == ("completed", 5, 6)
    assert usage.counters.gpu_us > 0
    assert usage.counters.ttft_us is not None
    assert session.end("r1").choices[0].reason == "length"


def test_a_loop_without_work_is_idle_and_says_nothing(session: Session) -> None:
    assert session.turn()
    assert session.said == []


def test_a_stop_string_ends_the_request_in_the_step_that_completes_it(small_worker: Any) -> None:
    session = Session(small_worker, alphabet="a")
    session.take_in(small_worker.submit(stop_strings=(b"aaa",), max_tokens=50))
    session.run()
    end = session.end("r1").choices[0]
    assert (end.reason, end.visible_bytes) == ("stop", 0)
    assert session.usages[0].output_tokens == 3


def test_a_cancel_after_two_tokens_is_billed_for_the_prompt_and_what_was_made(
    session: Session, small_worker: Any
) -> None:
    session.take_in(small_worker.submit(max_tokens=100))
    while len(session.text("r1")) < 2:
        session.turn()
    session.take_in(Cancel(response_id="r1", attempt=1, reason="client"))
    session.turn()
    (usage,) = session.usages
    assert (usage.terminal, usage.prompt_tokens, usage.output_tokens) == ("cancelled_client", 5, 2)
    assert not session.loop.has_work


def test_a_submit_meant_for_an_earlier_epoch_is_left_to_whoever_sent_it_on(session: Session, small_worker: Any) -> None:
    session.take_in(small_worker.submit(worker_epoch=session.loop.identity.epoch + 1))
    assert session.turn()
    session.take_in(small_worker.submit(worker_epoch=session.loop.identity.epoch, max_tokens=3))
    session.run()
    assert len(session.text("r1")) == 3


def test_an_answer_goes_on_where_an_earlier_attempt_stopped(small_worker: Any) -> None:
    undisturbed = Session(small_worker)
    undisturbed.take_in(small_worker.submit(max_tokens=20))
    undisturbed.run()
    whole = undisturbed.text("r1").encode()
    session = Session(small_worker)
    session.take_in(small_worker.submit(attempt=2, max_tokens=20, delivered_token_ids=(tuple(whole[:8]),)))
    session.run()
    said = [m for _, m in session.said if isinstance(m, Tokens)]
    assert (said[0].first_indexes, said[0].attempts) == ((8,), (2,))
    assert bytes(token_id for m in said for new in m.token_ids for token_id in new) == whole[8:]
    (usage,) = session.usages
    assert (usage.attempt, usage.prompt_tokens, usage.output_tokens) == (2, 5, 20)


PAUSED = PolicySnapshot(
    version=9,
    classes=gpu_classes(),
    tenants=(TenantClassPolicy(tenant_id="aurora", priority_class=PriorityClass.INTERACTIVE, allowed=False),),
)
OPEN = PolicySnapshot(version=10, classes=gpu_classes())


@pytest.mark.parametrize("delivered", [(tuple(b"ab"), ()), ((), ())], ids=["one has begun", "both may have"])
def test_a_choice_without_a_token_waits_with_its_response_while_the_class_is_paused(
    session: Session, small_worker: Any, delivered: tuple[tuple[int, ...], ...]
) -> None:
    session.take_in(PolicyChanged(snapshot=PAUSED))
    session.take_in(small_worker.submit(attempt=2, num_choices=2, max_tokens=4, delivered_token_ids=delivered))
    for _ in range(5):
        session.turn()
    assert session.usages == []
    session.take_in(PolicyChanged(snapshot=OPEN))
    session.run()
    assert [choice.reason for choice in session.end("r1").choices] == ["length", "length"]
    assert [(usage.terminal, usage.output_tokens) for usage in session.usages] == [("completed", 8)]


def test_what_had_started_elsewhere_goes_on_at_a_worker_that_drains(session: Session, small_worker: Any) -> None:
    started = {"attempt": 2, "num_choices": 2, "max_tokens": 4, "delivered_token_ids": (tuple(b"ab"), ())}
    session.take_in(PolicyChanged(snapshot=PAUSED), small_worker.submit("waiting", **started))
    session.turn()
    session.loop.drain()
    session.take_in(PolicyChanged(snapshot=OPEN), small_worker.submit("late", **started), small_worker.submit("fresh"))
    session.run()
    for name in ("waiting", "late"):
        assert [choice.reason for choice in session.end(name).choices] == ["length", "length"]
    assert session.end("fresh").reason == "draining"


def test_choices_of_one_submit_share_its_prompt_and_end_together(session: Session, small_worker: Any) -> None:
    session.take_in(small_worker.submit(num_choices=3, max_tokens=4))
    session.run()
    (usage,) = session.usages
    assert (usage.prompt_tokens, usage.output_tokens) == (5, 12)
    assert [choice.choice for choice in session.end("r1").choices] == [0, 1, 2]


def test_a_prompt_beyond_the_context_is_rejected_and_free(session: Session, small_worker: Any) -> None:
    session.take_in(small_worker.submit(prompt_token_ids=(1,) * 5_000))
    session.run()
    assert session.end("r1").reason in ("context_length", "never_fits")
    assert (session.usages[0].terminal, session.usages[0].prompt_tokens) == ("shed", 0)


def test_a_policy_change_is_in_force_in_the_next_turn(session: Session) -> None:
    classes = tuple(replace(row, max_queue_wait_ms=7) for row in gpu_classes())
    session.take_in(PolicyChanged(snapshot=PolicySnapshot(version=9, classes=classes)))  # type: ignore[arg-type]
    session.turn()
    assert session.loop.snapshot().policy_version == 9


def test_draining_lets_nobody_in_and_finishes_who_has_started(session: Session, small_worker: Any) -> None:
    session.take_in(small_worker.submit("early", max_tokens=30))
    session.turn()
    session.loop.drain()
    session.take_in(small_worker.submit("late"))
    session.run()
    assert len(session.text("early")) == 30
    assert session.end("late").reason == "draining"
    snapshot = session.loop.snapshot()
    assert (snapshot.draining, snapshot.ready) == (True, False)


def test_giving_up_ends_everything_as_the_platforms_failure(session: Session, small_worker: Any) -> None:
    session.take_in(small_worker.submit(max_tokens=1_000))
    session.turn()
    session.loop.give_up()
    session.run()
    assert session.usages[0].terminal == "failed_platform"


def test_a_snapshot_shows_the_batch_and_the_counters(session: Session, small_worker: Any) -> None:
    session.take_in(small_worker.submit("a", max_tokens=3), small_worker.submit("b", max_tokens=50))
    for _ in range(6):
        session.turn()
    snapshot = session.loop.snapshot()
    assert snapshot.ready
    assert [row.response_id for row in snapshot.board] == ["b"]
    assert snapshot.num_free_slots == snapshot.num_slots - 1
    interactive = snapshot.classes[PriorityClass.INTERACTIVE]
    assert sum(interactive.ttft.counts) == 2
    assert snapshot.output_tokens_total == len(session.text("a")) + len(session.text("b"))
    assert snapshot.busy_us_total > 0


def test_a_dump_tells_whether_the_books_balance_and_what_was_planned(session: Session, small_worker: Any) -> None:
    session.take_in(small_worker.submit(max_tokens=3))
    session.turn()
    dump = session.loop.dump()
    assert "books: balanced" in dump
    assert "r1/0@0+5" in dump


def act(session: Session, small_worker: Any, submits: list[Submit], action: tuple[Any, ...]) -> None:
    match action:
        case ("submit", prompt, max_tokens, num_choices, rank):
            submit = small_worker.submit(
                f"r{len(submits)}",
                gateway_id=f"g{len(submits) % 2}",
                prompt_token_ids=(7,) * prompt,
                max_tokens=max_tokens,
                num_choices=num_choices,
                priority_class=PriorityClass(rank),
            )
            submits.append(submit)
            session.take_in(submit)
        case ("cancel", number):
            session.take_in(Cancel(response_id=f"r{number}", attempt=1, reason="client"))
        case ("lose", gateway_id):
            session.loop.lose_gateway(gateway_id)
        case ("turn", count):
            for _ in range(count):
                session.turn()


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 400), st.integers(1, 40), st.integers(1, 2), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("lose"), st.sampled_from(["g0", "g1"])),
        st.tuples(st.just("turn"), st.integers(1, 5)),
    ),
    max_size=40,
)


@given(_ACTIONS)
@settings(max_examples=40, deadline=None)
def test_every_submit_leaves_one_end_and_one_usage_whatever_happens(
    small_worker: Any, actions: list[tuple[Any, ...]]
) -> None:
    session = Session(small_worker)
    submits: list[Submit] = []
    for action in actions:
        act(session, small_worker, submits, action)
    session.run()
    assert sorted(usage.response_id for usage in session.usages) == sorted(submit.response_id for submit in submits)
    by_id = {usage.response_id: usage for usage in session.usages}
    for submit in submits:
        session.end(submit.response_id)
        assert session.num_sent[submit.response_id] == by_id[submit.response_id].output_tokens


def test_an_operator_may_ask_where_the_time_of_a_request_goes(session: Session, small_worker: Any) -> None:
    """S162: who, why and how much, in words."""
    session.take_in(small_worker.submit("r1", max_tokens=6))
    session.turn()
    session.take_in(Explain(gateway_id="g7", response_id="r1"))
    session.turn()

    ((gateway_id, answer),) = [(to, said) for to, said in session.said if isinstance(said, Explained)]
    assert gateway_id == "g7"
    assert answer.is_known
    assert answer.outcome == ""
    assert answer.sentence.startswith("waited ")
    assert [words for _, words in answer.timeline] == ["let in", "started"]
    assert sum(us for phase, _, us in answer.waits if phase == "queued") == answer.queue_us


def test_a_request_that_nobody_knows_is_answered_too(session: Session) -> None:
    session.take_in(Explain(gateway_id="g7", response_id="never-was"))
    session.turn()

    assert session.said == [("g7", Explained(response_id="never-was", choice=0, is_known=False))]


def test_a_drain_that_was_meant_for_an_earlier_epoch_changes_nothing(session: Session) -> None:
    session.take_in(Drain(worker_epoch=session.loop.identity.epoch - 1, actor="ops"))
    assert not session.loop.is_told_to_drain
    session.take_in(Drain(worker_epoch=session.loop.identity.epoch, actor="ops"))
    assert session.loop.is_told_to_drain


def test_a_snapshot_brings_targets_tpot_and_what_the_policy_does(session: Session, small_worker: Any) -> None:
    session.take_in(small_worker.submit("r1", max_tokens=9), small_worker.submit("huge", prompt_token_ids=(1,) * 9_999))
    session.run()
    snapshot = session.loop.snapshot()
    chat = snapshot.classes[PriorityClass.INTERACTIVE]

    assert chat.ttft_target_us == gpu_classes()[PriorityClass.INTERACTIVE].ttft_target_ms * 1_000  # type: ignore[operator]
    assert sum(chat.tpot.counts) == sum(chat.duration.counts) == 1
    assert chat.tpot.sum_us * 8 + chat.ttft.sum_us <= chat.duration.sum_us < chat.tpot.sum_us * 8 + chat.ttft.sum_us + 8
    assert snapshot.policy.rung == "calm"
    assert snapshot.policy.sheds == (("interactive", "calm", "context_length", 1),)
