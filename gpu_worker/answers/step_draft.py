"""What one step has to say, gathered and put in order for each gateway. Knows messages; refuses to know why."""

from __future__ import annotations

from collections import defaultdict

from gpu_worker.answers.response import Choice
from wire.bus import FinishedOutput, StepOutput
from wire.messages import (
    Accepted,
    ChoiceFinished,
    Explained,
    Finished,
    Rejected,
    ToGateway,
    TokenLogprob,
    Tokens,
    Usage,
)

Logprobs = tuple[TokenLogprob | None, ...]
Row = tuple[str, int, int, int, tuple[int, ...], Logprobs | None]


class StepDraft:
    """Always, for each gateway: accepted and rejected first, then tokens, then finished."""

    def __init__(self) -> None:
        self._replies: defaultdict[str, list[ToGateway]] = defaultdict(list)
        self._columns: defaultdict[str, list[Row]] = defaultdict(list)
        self._finished: defaultdict[str, list[ToGateway]] = defaultdict(list)
        self.usages: list[Usage] = []
        self.outputs: dict[str, FinishedOutput] = {}

    def reply(self, gateway_id: str, message: Accepted | Rejected | Explained) -> None:
        self._replies[gateway_id].append(message)

    def send_tokens(self, choice: Choice, end: int) -> None:
        """Send the choice's tokens ``[num_sent, end)``."""
        response, start = choice.response, choice.num_sent
        if start == end:
            return
        submit = response.submit
        token_ids = tuple(choice.token_ids[start:end])
        logprobs = tuple(choice.logprobs[start:end]) if choice.logprobs else None
        row = (submit.response_id, submit.attempt, choice.index, start, token_ids, logprobs)
        self._columns[response.gateway_id].append(row)
        choice.num_sent = end

    def finish(self, gateway_id: str, message: ChoiceFinished | Finished) -> None:
        self._finished[gateway_id].append(message)

    def output(self, worker_id: str, epoch: int, step: int) -> StepOutput:
        to_gateways: dict[str, list[ToGateway]] = dict(self._replies)
        for gateway_id, rows in self._columns.items():
            response_ids, attempts, choices, first_indexes, token_ids, logprobs = zip(*rows, strict=True)
            tokens = Tokens(
                worker_id=worker_id,
                epoch=epoch,
                step=step,
                response_ids=response_ids,
                attempts=attempts,
                choices=choices,
                first_indexes=first_indexes,
                token_ids=token_ids,
                logprobs=logprobs if any(logprobs) else (),
            )
            to_gateways.setdefault(gateway_id, []).append(tokens)
        for gateway_id, messages in self._finished.items():
            to_gateways.setdefault(gateway_id, []).extend(messages)
        return StepOutput(to_gateways, self.usages, self.outputs)
