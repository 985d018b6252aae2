"""Starts processes, passes their output on, starts the dead again, and stops everything it started.

One thread and one loop: nothing here may block longer than a ready check. Every process leads a group of its own, so
that the terminal's Ctrl-C reaches only the supervisor and grandchildren can be found again.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from gateway.embedded.service import dying_with_parent
from gateway.supervision.output import LineBuffer, Output
from gateway.supervision.process import ProcessSpec, Restarts, status_in_words

_TICK_S = 0.1
_CHECK_EVERY_S = 0.25
_READ_BYTES = 65_536
_SILENT_S = 1.0  # a stop that takes longer says what it waits for
_SAME_WISH_S = 1.0  # a terminal and a wrapper may both pass on one Ctrl-C


class SupervisionError(Exception):
    """The platform cannot go on; the text is one sentence for the person at the terminal."""


@dataclass(slots=True)
class _Child:
    """One process over all its lives. Always: ``process`` is None exactly while it waits for ``start_at``."""

    spec: ProcessSpec
    restarts: Restarts = field(default_factory=Restarts)
    process: subprocess.Popen[bytes] | None = None
    lines: LineBuffer = field(default_factory=LineBuffer)
    started_at: float = 0.0
    checked_at: float = 0.0
    start_at: float = 0.0
    is_ready: bool = False
    is_doubted: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Always: after ``stop`` none of the processes it started, nor their children, is alive."""

    def __init__(self, output: Output, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._clock = clock
        self._children: dict[str, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._interrupted_at: float | None = None
        self.is_impatient = False

    def interrupt(self) -> None:
        """For signal handlers: the waiting calls return soon. A later second one cuts the patience of ``stop``."""
        now = self._clock()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at > _SAME_WISH_S:
            self.is_impatient = True

    @property
    def is_interrupted(self) -> bool:
        return self._interrupted_at is not None

    def start(self, specs: Iterable[ProcessSpec], timeout_s: float = 120.0) -> None:
        """Start all and return when all are ready (or on interrupt). Raises SupervisionError."""
        names = []
        for spec in specs:
            child = self._children[spec.name] = _Child(spec)
            names.append(spec.name)
            self._spawn(child)
        deadline = self._clock() + timeout_s
        while not self.is_interrupted and not all(self._children[name].is_ready for name in names):
            self.tick()
            if self._clock() > deadline:
                late = [name for name in names if not self._children[name].is_ready]
                what = f"did not become ready within {timeout_s:.0f} s"
                raise SupervisionError(". ".join(_explain(self._children[name], what) for name in late))

    def run_once(self, spec: ProcessSpec) -> None:
        """Run a short command to its end. Raises SupervisionError when it fails."""
        child = self._children[spec.name] = _Child(spec)
        self._spawn(child)
        process = _running(child)
        while process.poll() is None and not self.is_interrupted:
            self.tick(watch=False)
        self._end_life(child)
        del self._children[spec.name]
        if process.returncode and not self.is_interrupted:
            raise SupervisionError(_explain(child, f"failed with {status_in_words(process.returncode)}"))

    def run(self) -> None:
        """Keep everything alive until interrupted. Raises SupervisionError when a process cannot be kept."""
        while not self.is_interrupted:
            self.tick()

    def tick(self, *, watch: bool = True) -> None:
        """Pass on output for a moment, then look after every process once."""
        self._pass_output_on(_TICK_S)
        if watch:
            for child in self._children.values():
                self._look_after(child)

    def stop(self, stages: Iterable[Iterable[str]]) -> None:
        """Stage by stage: ask kindly, wait, then kill what is left of each group. Names that never ran are skipped."""
        for stage in stages:
            children = [self._children.pop(name) for name in stage if name in self._children]
            for child in children:
                if child.is_alive:
                    _running(child).send_signal(child.spec.stop_signal)
            self._wait_for_ends(children)
            for child in children:
                self._end_life(child)

    def memory_mib(self, name: str) -> int:
        """Resident memory of a process and its children, in MiB."""
        process = self._children[name].process
        if process is None:
            return 0
        try:
            leader = psutil.Process(process.pid)
            total = sum(one.memory_info().rss for one in [leader, *leader.children(recursive=True)])
        except psutil.NoSuchProcess:
            return 0
        return int(total >> 20)

    def _look_after(self, child: _Child) -> None:
        now = self._clock()
        if child.process is None:
            if now >= child.start_at:
                self._spawn(child)
            return
        status = child.process.poll()
        if status is not None:
            self._bury(child, status, now)
        elif not child.is_ready and now - child.checked_at >= _CHECK_EVERY_S:
            child.checked_at = now
            self._check_ready(child, now)

    def _check_ready(self, child: _Child, now: float) -> None:
        lived_s = now - child.started_at
        spec = child.spec
        if spec.is_ready is None:
            child.is_ready = lived_s >= spec.settled_s
        else:
            child.is_ready = lived_s >= spec.asked_after_s and self._says_ready(child)
        if child.is_ready:
            pid = _running(child).pid
            self._output.line(spec.name, f"ready after {lived_s:.1f} s (pid {pid}, {self.memory_mib(spec.name)} MiB)")

    def _says_ready(self, child: _Child) -> bool:
        """What a check cannot make sense of is not ready, and told once in a life: it ends nobody."""
        check = child.spec.is_ready
        assert check is not None
        try:
            return check()
        except Exception as error:
            if not child.is_doubted:
                child.is_doubted = True
                self._output.line(child.spec.name, f"cannot be asked yet: {type(error).__name__}: {error}")
            return False

    def _bury(self, child: _Child, status: int, now: float) -> None:
        self._end_life(child)
        delay_s = child.restarts.delay_s(now - child.started_at, status)
        died = f"ended with {status_in_words(status)}"
        if delay_s is None:
            raise SupervisionError(
                _explain(child, f"{died} again and again" if child.restarts.num_short_lives > 1 else died)
            )
        self._output.line(child.spec.name, f"{died}; starting it again in {delay_s:.1f} s")
        child.start_at = now + delay_s

    def _spawn(self, child: _Child) -> None:
        spec = child.spec
        if spec.before_start is not None:
            spec.before_start()
        process = subprocess.Popen(
            [*dying_with_parent(spec.stop_signal), *spec.command()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(spec.environment),
            process_group=0,
        )
        child.process, child.is_ready, child.is_doubted = process, False, False
        child.started_at = child.checked_at = self._clock()
        child.lines = LineBuffer()
        if process.stdout is not None:
            self._selector.register(process.stdout, selectors.EVENT_READ, child)

    def _end_life(self, child: _Child) -> None:
        """After the leader ended, by itself or not: no grandchild stays, and its last words are passed on."""
        process = child.process
        if process is None:
            return
        _kill_group(child)
        process.wait()
        if process.stdout is not None and not process.stdout.closed:
            if process.stdout in self._selector.get_map():
                self._selector.unregister(process.stdout)
            self._drain(child, process.stdout.fileno())
            process.stdout.close()
        child.process, child.is_ready = None, False

    def _wait_for_ends(self, children: Sequence[_Child]) -> None:
        """Each as long as it may take. Says who is waited for where that is longer than a moment."""
        asked_at, is_told = self._clock(), False
        while not self.is_impatient:
            waited_s = self._clock() - asked_at
            late = [one for one in children if one.is_alive and waited_s <= one.spec.stop_timeout_s]
            if not late:
                return
            if waited_s > _SILENT_S and not is_told:
                is_told = True
                names = " and ".join(one.spec.name for one in late)
                most_s = max(one.spec.stop_timeout_s for one in late)
                self._output.line("up", f"waiting for {names}, {most_s:.0f} s at most; Ctrl-C ends them at once")
            self._pass_output_on(_TICK_S)

    def _pass_output_on(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if not self._read(key.data, key.fd):
                self._selector.unregister(key.fd)  # the far end closed it; the pipe itself is closed with the life

    def _drain(self, child: _Child, descriptor: int) -> None:
        os.set_blocking(descriptor, False)  # a stranger that left the group could hold the far end open
        try:
            while self._read(child, descriptor):
                pass
        except BlockingIOError:
            return

    def _read(self, child: _Child, descriptor: int) -> bool:
        data = os.read(descriptor, _READ_BYTES)
        for line in child.lines.feed(data):
            self._output.line(child.spec.name, line)
        return bool(data)


def _running(child: _Child) -> subprocess.Popen[bytes]:
    if child.process is None:
        raise SupervisionError(f"{child.spec.name} is not running.")
    return child.process


def _kill_group(child: _Child) -> None:
    if child.process is not None:
        try:
            os.killpg(child.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nobody of the group is left


def _explain(child: _Child, what: str) -> str:
    words = child.lines.last_lines[-1] if child.lines.last_lines else "nothing"
    return f"{child.spec.name} {what}; its last words: {words}"
