"""What is asked under one Idempotency-Key: the operations that belong to the key, each let in at most once.

An operation's id is the key's own, so that of two who ask for the same the door lets in one (``limits.lua``), however
long the other slept. Who comes after somebody that was not heard of any more asks first what became of the operation.
Knows operations and their fates; refuses to know keys and answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never
from uuid import UUID, uuid5

from gateway.admission import Denied
from gateway.asking import Ask
from gateway.auth import Caller
from gateway.door import Door, Entered, Keep
from gateway.errors import InvalidRequest, Reason, Refusal
from gateway.fates import Answered, AnswerLost, EndedFree, Fate, Fates, NeverSeen, UnderWay
from gateway.policy_feed import PolicyFeed
from gateway.postgresql import AWAY
from gateway.shown_again import shown_again
from scheduler_engine.policy import PriorityClass
from wire.bus import BusError

TWIN_RUNNING = Refusal(
    reason=Reason.TWIN_RUNNING,
    message="A request with this Idempotency-Key is under way; its answer can be had soon.",
    param="Idempotency-Key",
)
_SPENT = Refusal(
    reason=Reason.KEY_SPENT,
    message="What was asked under this Idempotency-Key was answered and charged; the answer is not kept any more.",
    param="Idempotency-Key",
)


class Once:
    """Always: of all who ask under the key, one is let in for each operation; the others are shown what came of it."""

    def __init__(self, door: Door, policy: PolicyFeed, fates: Fates, operation: str, *, is_left: bool) -> None:
        """``is_left``: somebody was at work on it before, and may still be."""
        self.operation = operation
        self._door = door
        self._policy = policy
        self._fates = fates
        self._is_left = is_left
        self.begun: list[str] = []  # operations that were let in, here or by another
        self.is_spent = False  # charged, and nothing is left to show
        self._tenant_id = ""

    async def enter(self, caller: Caller, asks: Sequence[Ask], keep: Keep | None = None) -> list[Entered] | Denied:
        """As the door's own: whichever have not been before go through it together, in the class of those that have.
        Raises also InvalidRequest: one of them is under way, or its answer is gone.
        """
        self._tenant_id = caller.tenant_id
        shown: dict[int, Entered] = {}
        wanted: dict[str, Ask] = {}
        served_in: PriorityClass | None = None
        for number, ask in enumerate(asks):
            name = self.operation if number == 0 else str(uuid5(UUID(self.operation), str(number)))
            found = await self._after_another(name) if self._is_left else name
            if isinstance(found, Answered):
                served_in = found.priority_class
                shown[number] = await shown_again(self._door.texts, self._policy, caller, ask, served_in, found.output)
            else:
                wanted[found] = replace(ask, response_id=found)
        entered = await self._door.enter(caller, [*wanted.values()], keep, only=served_in) if wanted else []
        if not isinstance(entered, Denied) or entered.is_unsure:
            self.begun += wanted
        if isinstance(entered, Denied):
            return entered
        let_in = iter(entered)
        return [shown[number] if number in shown else next(let_in) for number in range(len(asks))]

    async def _after_another(self, name: str) -> Answered | str:
        """What came of an operation; or the id under which it can be asked for. Raises InvalidRequest."""
        while True:
            match fate := await self._fate(name):
                case NeverSeen():
                    return name
                case EndedFree():
                    name = str(uuid5(UUID(name), "again"))
                case Answered():
                    self.begun.append(name)
                    return fate
                case UnderWay():
                    self.begun.append(name)
                    raise InvalidRequest(TWIN_RUNNING)
                case AnswerLost():
                    self.is_spent = True
                    raise InvalidRequest(_SPENT)
                case _ as never:
                    assert_never(never)

    async def _fate(self, name: str) -> Fate:
        try:
            return await self._fates.of(name, self._tenant_id)
        except AWAY as error:
            raise BusError("what became of the first request under this key cannot be looked up now") from error
