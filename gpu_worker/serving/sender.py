"""The worker's voice: publishes what the steps said, in order, while later steps run. Knows outages; judges no message.

Runs on a thread of its own behind a bounded queue: when the Bus stays away the loop comes to wait, since a token counts
only once it is published.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from gpu_worker.clock import Clock
from gpu_worker.serving.outage import FIRST_RETRY_S, Outage, say
from wire.bus import BusError, BusFull, Fenced, FinishedOutput, StepOutput, WorkerBus
from wire.messages import ToGateway, Usage

MAX_OUTPUTS_WAITING = 1_024
LAST_WORDS_US = 5_000_000  # how long to try after the worker has been told to end


class Sender:
    """Always: outputs are published once each, in the order they were put, or ``gave_up`` is true."""

    def __init__(self, bus: WorkerBus, clock: Clock, on_deaf_gateway: Callable[[str], None]) -> None:
        self.gave_up = False
        self._bus = bus
        self._clock = clock
        self._on_deaf_gateway = on_deaf_gateway
        self._outputs: queue.Queue[StepOutput | None] = queue.Queue(MAX_OUTPUTS_WAITING)

    def put(self, output: StepOutput | None, over: threading.Event) -> None:
        """Waits while too much is waiting, but not once ``over``. None is the last word."""
        while True:
            try:
                self._outputs.put(output, timeout=0.5)
                return
            except queue.Full:
                if over.is_set():
                    return

    def send(self, over: threading.Event) -> None:
        """Until the last word has been sent. Raises Fenced."""
        while True:
            output, is_last = self._gather()
            if not output.is_empty:
                self._publish(output, over)
            if is_last:
                return

    def _gather(self) -> tuple[StepOutput, bool]:
        """The next step's output, together with those that have piled up behind it."""
        outputs = [self._outputs.get()]
        while outputs[-1] is not None:
            try:
                outputs.append(self._outputs.get_nowait())
            except queue.Empty:
                break
        said = [output for output in outputs if output is not None]
        return (said[0] if len(said) == 1 else merged(said)), outputs[-1] is None

    def _publish(self, output: StepOutput, over: threading.Event) -> None:
        outage = Outage("sending")
        give_up_at_us: int | None = None
        while True:
            try:
                self._bus.publish(output)
                outage.is_over()
                return
            except Fenced:
                raise
            except BusFull as error:
                pause_s = outage.pause_s(error)
                if error.gateway_id is not None:
                    output = without_gateway(output, error.gateway_id)
                    self._on_deaf_gateway(error.gateway_id)
                    continue
            except BusError as error:
                pause_s = outage.pause_s(error)
            if not over.wait(pause_s):
                continue
            give_up_at_us = give_up_at_us or self._clock.now_us() + LAST_WORDS_US
            if self._clock.now_us() >= give_up_at_us:
                self.gave_up = True
                say("the Bus did not come back; the last outputs were not sent")
                return
            self._clock.sleep_us(int(FIRST_RETRY_S * 1_000_000))


def merged(outputs: Sequence[StepOutput]) -> StepOutput:
    """Several steps' outputs as one, in order."""
    to_gateways: dict[str, list[ToGateway]] = {}
    usages: list[Usage] = []
    finished: dict[str, FinishedOutput] = {}
    for output in outputs:
        for gateway_id, messages in output.to_gateways.items():
            to_gateways.setdefault(gateway_id, []).extend(messages)
        usages.extend(output.usages)
        finished.update(output.outputs)
    return StepOutput(to_gateways, usages, finished)


def without_gateway(output: StepOutput, gateway_id: str) -> StepOutput:
    """The same output, saying nothing to one gateway; its usages stay."""
    rest = {name: messages for name, messages in output.to_gateways.items() if name != gateway_id}
    return StepOutput(rest, output.usages, output.outputs)
