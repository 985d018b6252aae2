"""Submits whose grammar is still being compiled: they wait here, and nobody waits for them.

Knows compilations under way; refuses to know the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from gpu_worker.answers.grammars import GrammarCompiler
from gpu_worker.executor import Constraint
from scheduler_engine.events import RejectReason
from wire.grammars import GrammarError
from wire.messages import Attach, Submit

COMPILE_LIMIT_US = 5_000_000
LOOK_AGAIN_US = 2_000
BUSY_RETRY_US = 1_000_000


@dataclass(slots=True)
class Guest:
    """A Submit on its way in. ``refusal``: its grammar is none, or it waited too long for the compiler, which bounds
    each grammar itself: the machine is busy then. One that has started elsewhere waits as long as that takes.
    """

    submit: Submit
    received_at_us: int
    compilation: Future[list[Constraint]] | None
    constraints: Sequence[Constraint] = ()
    refusal: RejectReason | None = None


class Anteroom:
    """Always: who enters leaves once, by ``ready`` or by ``leave``."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """Without a compiler every grammar is refused."""
        self._compiler = compiler
        self._guests: dict[str, Guest] = {}

    def __len__(self) -> int:
        return len(self._guests)

    def enter(self, submit: Submit, received_at_us: int) -> None:
        """A second Submit of a response that is here already changes nothing."""
        grammar = submit.sampling.grammar
        if grammar is None or submit.response_id in self._guests:
            return
        compilation = None
        if self._compiler is not None:
            compilation = self._compiler.compile(grammar, submit.num_choices)
            # A grammar that is complete says so by a stop token, and then nothing can follow.
            stops = submit.stop_token_ids or self._compiler.stop_token_ids
            submit = replace(submit, stop_token_ids=stops, min_tokens=0)
        self._guests[submit.response_id] = Guest(submit, received_at_us, compilation)

    def ready(self, now_us: int) -> list[Guest]:
        """Those whose grammar is compiled or refused, in the order in which they came."""
        return self._leave(lambda guest: _is_decided(guest, now_us))

    def leave(self, response_id: str, attempt: int) -> list[Guest]:
        """The guest who is to be cancelled, if here: it needs its constraint no more."""
        return self._leave(lambda guest: (guest.submit.response_id, guest.submit.attempt) == (response_id, attempt))

    def leave_of_gateway(self, gateway_id: str) -> list[Guest]:
        return self._leave(lambda guest: guest.submit.gateway_id == gateway_id)

    def leave_all(self) -> list[Guest]:
        return self._leave(lambda guest: True)

    def attach(self, attach: Attach) -> None:
        """Another gateway owns the response from now on."""
        guest = self._guests.get(attach.response_id)
        if guest is not None and guest.submit.attempt == attach.attempt:
            guest.submit = replace(guest.submit, gateway_id=attach.gateway_id)

    def gateways(self) -> list[str]:
        """Of each guest, its owner."""
        return [guest.submit.gateway_id for guest in self._guests.values()]

    def _leave(self, chosen: Callable[[Guest], bool]) -> list[Guest]:
        leaving = [guest for guest in self._guests.values() if chosen(guest)]
        for guest in leaving:
            del self._guests[guest.submit.response_id]
        return leaving


def _is_decided(guest: Guest, now_us: int) -> bool:
    if guest.compilation is None:
        guest.refusal = RejectReason.GRAMMAR
    elif guest.compilation.done():
        try:
            guest.constraints = guest.compilation.result()
        except GrammarError:
            guest.refusal = RejectReason.GRAMMAR
    elif now_us - guest.received_at_us >= COMPILE_LIMIT_US and not guest.submit.has_started:
        guest.compilation.cancel()
        guest.refusal = RejectReason.CLASS_CLOSED
    else:
        return False
    return True
