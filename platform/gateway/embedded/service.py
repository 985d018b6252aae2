"""What a supervisor must know of an embedded server, and the few things both servers share."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

LOOPBACK = "127.0.0.1"
Popen = subprocess.Popen[bytes]


class EmbeddedError(Exception):
    """An embedded server cannot be made or started; the text is one sentence for the person at the terminal."""


class EmbeddedService(Protocol):
    """A server that runs in the foreground. Always: ``prepare`` may be called again at any time while it is stopped."""

    name: str
    stop_signal: signal.Signals

    def prepare(self) -> None:
        """Create what is missing on disk and clean up after a kill. Raises EmbeddedError."""
        ...

    def command(self) -> list[str]: ...

    def is_ready(self) -> bool: ...


def write_private(path: Path, text: str) -> None:
    """Replace ``path`` in one step by a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def kept_secret(path: Path) -> str:
    """The secret in ``path``, made on first use. Two processes that ask at once get the same one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        write_private(draft, secrets.token_urlsafe(48))
        try:
            os.link(draft, path)  # fails where another process was first, and then its secret counts
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text(encoding="utf-8").strip()


def kept_port(path: Path) -> int:
    """A free loopback port, the same as last time where that one is still free."""
    wanted = int(path.read_text(encoding="utf-8")) if path.exists() else 0
    port = wanted if wanted and port_is_free(wanted) else _any_free_port()
    if port != wanted:
        write_private(path, str(port))
    return port


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _any_free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def dying_with_parent(stop_signal: signal.Signals) -> list[str]:
    """Command prefix: the process gets ``stop_signal`` when its parent ends, so that a kill leaves no server behind.

    Empty where the machine has no setpriv (util-linux); there a killed parent does leave its servers behind.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", stop_signal.name.removeprefix("SIG"), "--"] if setpriv else []


def start(service: EmbeddedService, log: int | None = None, environment: Mapping[str, str] | None = None) -> Popen:
    """Start a prepared service in a process group of its own; both its outputs go to the descriptor ``log``."""
    return subprocess.Popen(
        [*dying_with_parent(service.stop_signal), *service.command()],
        stdin=subprocess.DEVNULL,
        stdout=log if log is not None else subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env=environment,
        process_group=0,
    )


def wait_until_ready(service: EmbeddedService, process: Popen, timeout_s: float = 30.0) -> None:
    """Raises EmbeddedError when the process ends first or takes longer than ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not service.is_ready():
        if process.poll() is not None:
            raise EmbeddedError(f"{service.name} ended with status {process.returncode} while it was starting.")
        if time.monotonic() > deadline:
            raise EmbeddedError(f"{service.name} did not become ready within {timeout_s:.0f} s.")
        time.sleep(0.02)


def stop(service: EmbeddedService, process: Popen, timeout_s: float = 15.0) -> None:
    """Ask kindly, then kill: no server outlives its owner."""
    if process.poll() is None:
        process.send_signal(service.stop_signal)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def running(service: EmbeddedService, log_path: Path) -> Iterator[Popen]:
    """Prepare, start, wait until ready; stop at the end. For tests and one-off commands."""
    service.prepare()
    with log_path.open("ab") as log:
        process = start(service, log.fileno())
    try:
        wait_until_ready(service, process)
        yield process
    finally:
        stop(service, process)
