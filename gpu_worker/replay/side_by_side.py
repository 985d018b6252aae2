"""Runs that need nothing of each other, in processes of their own: forked, so that what they share is in memory once.

Knows processes and pipes; refuses to know what runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

Show = Callable[[float], None]  # how much of a run is done, from 0 to 1
Run = Callable[[Show], Any]  # what it returns must be picklable


class RunLost(Exception):
    """The process of a run has ended, and nobody knows why."""


_CAN_FORK = "fork" in multiprocessing.get_all_start_methods()


def side_by_side(runs: Iterator[Run], most: int, show: Callable[[int, float], None]) -> list[Any]:
    """What the runs return, in their order; ``most`` of them at a time, the next asked for when one has ended.

    ``show``: number of a run and how much of it is done. What a run or ``show`` raises is raised here, and no process
    outlives this call, nor for long the process that made it.
    """
    if most == 1 or not _CAN_FORK:
        return [run(lambda done, number=number: show(number, done)) for number, run in enumerate(runs)]  # type: ignore[misc]
    results: list[Any] = []
    under_way: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while True:
            while len(under_way) < most and (run := next(runs, None)) is not None:
                told, process = _begin(run)
                under_way[told] = len(results), process
                results.append(None)
            if not under_way:
                return results
            ready = wait(list(under_way))
            for told in [each for each in under_way if each in ready]:
                number, process = under_way[told]
                word, value = _heard(told)
                if word == "done":
                    show(number, value)
                    continue
                del under_way[told]
                told.close()
                process.join()
                if word == "raised":
                    raise value
                results[number] = value
    finally:
        for told, (_, process) in under_way.items():
            process.kill()
            process.join()
            told.close()


@contextlib.contextmanager
def beside(run: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """A run in a process of its own, while the caller does something else: call what comes with it for its result.

    Without forks it runs when it is asked for. What it raises is raised then.
    """
    if not _CAN_FORK:
        yield run
        return
    told, process = _begin(lambda show: run())

    def result() -> Any:
        word, value = _heard(told)
        if word == "raised":
            raise value
        return value

    try:
        yield result
    finally:
        process.kill()
        process.join()
        told.close()


def _heard(told: Connection) -> tuple[str, Any]:
    try:
        word, value = told.recv()
    except EOFError:
        return "raised", RunLost("a process of the replay ended without a word: was it killed for its memory?")
    return word, value


def _begin(run: Run) -> tuple[Connection, BaseProcess]:
    told, tell = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_work, args=(run, told, tell), daemon=True)
    process.start()
    tell.close()
    return told, process


def _work(run: Run, told: Connection, tell: Connection) -> None:
    told.close()  # else this process would hear itself when nobody else is left
    try:
        try:
            word, value = "result", run(lambda done: tell.send(("done", done)))
        except BrokenPipeError:
            raise
        except Exception as error:
            word, value = "raised", error
        tell.send((word, value))
    except BrokenPipeError:
        pass  # whoever asked is gone
