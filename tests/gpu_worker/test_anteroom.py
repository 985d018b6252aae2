"""While a grammar is being compiled nobody waits but its own request, and that one can still be cancelled."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from gpu_worker.answers.anteroom import COMPILE_LIMIT_US
from gpu_worker.clock import VirtualClock
from wire.grammars import GrammarError
from wire.messages import Attach, Cancel, Finished, Grammar, Rejected, SamplingParameters, Tokens, Usage

SAMPLING = SamplingParameters(grammar=Grammar(kind="regex", source="a+"))


class SlowCompiler:
    """Compiles when the test says so."""

    stop_token_ids = (257,)

    def __init__(self) -> None:
        self.compilations: list[Future[Any]] = []

    def compile(self, grammar: Grammar, count: int) -> Future[Any]:
        self.compilations.append(Future())
        return self.compilations[-1]


class Room:
    def __init__(self, small_worker: Any) -> None:
        self.clock = VirtualClock()
        self.compiler = SlowCompiler()
        self.loop = small_worker.loop(self.clock, grammars=self.compiler)
        self.said: list[tuple[str, Any]] = []
        self.usages: list[Usage] = []

    def turn(self, times: int = 1) -> Any:
        for _ in range(times):
            turn = self.loop.turn()
            self.loop.check_books()
            self.said += [(name, message) for name, said in turn.output.to_gateways.items() for message in said]
            self.usages += turn.output.usages
        return turn

    def take_in(self, message: Any) -> None:
        self.loop.take_in(message, self.clock.now_us())

    def ends(self) -> list[Any]:
        return [message for _, message in self.said if isinstance(message, Finished | Rejected)]

    def num_tokens(self) -> int:
        return sum(len(new) for _, m in self.said if isinstance(m, Tokens) for new in m.token_ids)


@pytest.fixture
def room(small_worker: Any) -> Room:
    return Room(small_worker)


def test_others_run_while_a_grammar_is_compiled_and_its_request_runs_after(room: Room, small_worker: Any) -> None:
    room.take_in(small_worker.submit("slow", sampling=SAMPLING))
    room.take_in(small_worker.submit("quick"))
    turn = room.turn(6)
    assert [end.response_id for end in room.ends()] == ["quick"]
    assert turn.wake_at_us is not None  # an idle loop looks again
    assert turn.wake_at_us > room.clock.now_us()
    assert room.loop.has_work
    room.compiler.compilations[0].set_result([None])
    room.turn(6)
    assert [end.response_id for end in room.ends()] == ["quick", "slow"]
    assert not room.loop.has_work


def test_who_waits_too_long_for_the_compiler_is_told_to_come_again_and_not_that_its_grammar_is_bad(
    room: Room, small_worker: Any
) -> None:
    room.take_in(small_worker.submit("slow", sampling=SAMPLING))
    room.turn()
    room.clock.sleep_us(COMPILE_LIMIT_US)
    room.turn()
    (end,) = room.ends()
    assert (type(end), end.reason, end.retry_after_us) == (Rejected, "class_closed", 1_000_000)
    assert [usage.terminal for usage in room.usages] == ["shed"]


def test_what_has_started_elsewhere_waits_for_the_compiler_as_long_as_that_takes(room: Room, small_worker: Any) -> None:
    room.take_in(small_worker.submit("slow", sampling=SAMPLING, attempt=2, delivered_token_ids=((97,),)))
    room.turn()
    room.clock.sleep_us(2 * COMPILE_LIMIT_US)
    room.turn()
    assert room.said == []
    room.compiler.compilations[0].set_result([None])
    room.turn(6)
    assert [type(end) for end in room.ends()] == [Finished]


@pytest.mark.parametrize("way", ["cancel", "lose_gateway", "give_up"])
def test_one_that_is_cancelled_before_its_grammar_is_there_ends_once_and_never_runs(
    room: Room, small_worker: Any, way: str
) -> None:
    room.take_in(small_worker.submit("slow", sampling=SAMPLING, num_choices=2))
    room.turn()
    match way:
        case "cancel":
            room.take_in(Cancel(response_id="slow", attempt=1, reason="client"))
        case "lose_gateway":
            assert room.loop.gateways() == {"g1": 1}
            room.loop.lose_gateway("g1")
        case _:
            room.loop.give_up()
    room.turn(2)
    room.compiler.compilations[0].set_result([None, None])
    room.turn(4)
    assert len(room.ends()) == len(room.usages) == 1
    assert room.num_tokens() == 0
    assert not room.loop.has_work


def test_a_cancel_of_another_attempt_does_not_let_it_in_without_its_grammar(room: Room, small_worker: Any) -> None:
    room.take_in(small_worker.submit("slow", sampling=SAMPLING, attempt=2))
    room.take_in(Cancel(response_id="slow", attempt=1, reason="client"))
    room.turn(3)
    assert room.said == []


def test_the_gateway_that_has_attached_meanwhile_gets_the_answer(room: Room, small_worker: Any) -> None:
    room.take_in(small_worker.submit("slow", sampling=SAMPLING))
    room.take_in(Attach(response_id="slow", attempt=1, gateway_id="g2", from_index=0))
    room.compiler.compilations[0].set_result([None])
    room.turn(6)
    assert {gateway_id for gateway_id, _ in room.said} == {"g2"}


def test_a_submit_that_comes_twice_is_compiled_and_answered_once(room: Room, small_worker: Any) -> None:
    for _ in range(2):
        room.take_in(small_worker.submit("slow", sampling=SAMPLING))
    assert len(room.compiler.compilations) == 1
    room.compiler.compilations[0].set_result([None])
    room.turn(6)
    assert len(room.ends()) == len(room.usages) == 1


def test_a_compilation_that_fails_refuses_its_request(room: Room, small_worker: Any) -> None:
    room.take_in(small_worker.submit("slow", sampling=SAMPLING))
    room.compiler.compilations[0].set_exception(GrammarError("no"))
    room.turn(2)
    assert [end.reason for end in room.ends()] == ["grammar"]


def test_a_worker_without_a_compiler_refuses_every_grammar(small_worker: Any) -> None:
    loop = small_worker.loop(VirtualClock())
    loop.take_in(small_worker.submit("r", sampling=SAMPLING), 0)
    output = loop.turn().output
    (message,) = output.to_gateways["g1"]
    assert (type(message), message.reason) == (Rejected, "grammar")
    assert len(output.usages) == 1
