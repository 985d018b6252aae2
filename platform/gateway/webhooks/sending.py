"""One POST to an address that a tenant chose, and to nothing behind our own walls (SSRF).

Always: the name is looked up once, every address it has must be a public one, and the connection goes to the address
that was judged: a name that changes its mind (DNS rebinding) changes nothing. No redirect is followed, no proxy asked.
Whether a name is unknown, private or silent is told to the operator's log alone: to a tenant it would map our network.
"""

from __future__ import annotations

import http.client
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

TIMEOUT_S = 10.0  # to connect, and once more for all that follows
PORTS = {"https": 443, "http": 80}
NOT_REACHED = "not reached"
OWN_NAMES = ("localhost", "localdomain", "local", "internal", "home.arpa", "invalid")  # of one machine or network
Resolve = Callable[[str, int], Sequence[str]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status`` None: there was no answer, and ``error`` says why."""

    status: int | None
    error: str = ""

    @property
    def is_heard(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class ForbiddenAddress(Exception):
    """The URL is none that we call; the text says why."""


def check_url(url: str, *, may_be_private: bool = False) -> tuple[str, str, int, str]:
    """Scheme, host, port and path. Raises ForbiddenAddress."""
    try:
        parts = urlsplit(url)
        port = PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    except ValueError as error:
        raise ForbiddenAddress("this is no URL") from error
    if parts.scheme != "https" and not (may_be_private and parts.scheme == "http"):
        raise ForbiddenAddress("only https:// addresses are called")
    if not port:
        raise ForbiddenAddress("nothing listens on port 0")
    if not parts.hostname or parts.username or parts.password:
        raise ForbiddenAddress("the URL needs a host, and no name or password before it")
    if any(character.isspace() or not character.isprintable() for character in url):
        raise ForbiddenAddress("the URL has blanks in it")
    if not may_be_private:
        _must_look_public(parts.hostname)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, parts.hostname, port, path


def resolve(host: str, port: int) -> Sequence[str]:
    """Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    may_be_private: bool = False,
    resolve: Resolve = resolve,
    timeout_s: float = TIMEOUT_S,
) -> Outcome:
    """Whatever goes wrong outside is an outcome."""
    try:
        scheme, host, port, path = check_url(url, may_be_private=may_be_private)
        line = _reached(host, port, may_be_private, resolve, timeout_s)
        if line is None:
            return Outcome(None, NOT_REACHED)
        with _opened(scheme, host, port, line, timeout_s) as connection:
            connection.request("POST", path, body=body, headers=dict(headers))
            return Outcome(connection.getresponse().status)
    except (ForbiddenAddress, OSError, http.client.HTTPException, UnicodeError) as error:
        return Outcome(None, f"{type(error).__name__}: {error}"[:200])


def _reached(host: str, port: int, may_be_private: bool, resolve: Resolve, timeout_s: float) -> socket.socket | None:
    """A line to the first of the host's addresses; None where that is not to be had, for whatever reason."""
    try:
        addresses = resolve(host, port)
        if not may_be_private:
            for address in addresses:
                _must_be_public(address)
        if addresses:
            return socket.create_connection((addresses[0], port), timeout_s)
        reason: Exception | str = "it has no address"
    except (ForbiddenAddress, OSError, UnicodeError) as error:
        reason = error
    log.info("the host %s of a webhook is not reached: %s", host, reason)
    return None


@contextmanager
def _opened(
    scheme: str, host: str, port: int, line: socket.socket, timeout_s: float
) -> Iterator[http.client.HTTPConnection]:
    """Speaks of ``host`` on ``line``. After ``timeout_s`` the line is cut, however the other side trickles."""
    connection = http.client.HTTPConnection(host, port)
    if scheme == "https":
        context = ssl.create_default_context()
        line = context.wrap_socket(line, server_hostname=host, do_handshake_on_connect=False)
    watchdog = threading.Timer(timeout_s, _cut, [line])
    watchdog.daemon = True
    watchdog.start()
    try:
        if isinstance(line, ssl.SSLSocket):
            line.do_handshake()
        connection.sock = line
        yield connection
    finally:
        watchdog.cancel()
        connection.close()
        line.close()


def _cut(line: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(line, socket.SHUT_RDWR)


def _must_look_public(host: str) -> None:
    """What can be told of a host without asking for it: an address however it is written, a name of one network."""
    try:
        name = host.encode("idna").decode().lower().rstrip(".")
    except UnicodeError as error:
        raise ForbiddenAddress("the host is no name") from error
    if address := _address(name):
        _must_be_public(address)
    elif "." not in name or any(f".{name}".endswith(f".{own}") for own in OWN_NAMES):
        raise ForbiddenAddress("the host is no name that the open network knows")


def _address(name: str) -> str:
    """Of a literal, also of the short and numeric forms of IPv4 that resolvers take; empty for a name."""
    if ":" in name:
        return name
    try:
        return socket.inet_ntoa(socket.inet_aton(name))
    except OSError:
        return ""


def _must_be_public(address: str) -> None:
    """Also what only looks public: IPv4 inside IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError as error:
        raise ForbiddenAddress("this is no address") from error
    if isinstance(found, ipaddress.IPv6Address):
        inside = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inside is not None:
            found = inside
        elif found in ipaddress.ip_network("64:ff9b::/96"):
            found = ipaddress.ip_address(int(found) & 0xFFFF_FFFF)
    if not found.is_global or found.is_multicast or found.is_reserved:
        raise ForbiddenAddress(f"{address} is no public address")
