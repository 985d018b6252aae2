"""Where a connection comes from, also behind proxies. Refuses to believe the header of who is not trusted to write it.

Everything that looks at a client's address reads it in the ASGI scope: Django (REMOTE_ADDR, and by it the limits of
sign-ins) and the limits of slow bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import Any


def behind_proxies(scope: Mapping[str, Any], num_proxies: int) -> dict[str, Any]:
    """The scope with the client that the outermost of so many proxies saw. Each proxy writes whom it saw behind what
    stands in X-Forwarded-For; what a client wrote there itself stands before all of theirs. The connection's own
    client without trusted proxies, and for who came past one of them. IPv4 that is written as IPv6 is IPv4.
    """
    found = dict(scope)
    client = scope.get("client")
    if client:
        found["client"] = (_address(client[0]) or client[0], *client[1:])
    if num_proxies > 0:
        written = b",".join(value for name, value in scope["headers"] if name.lower() == b"x-forwarded-for")
        seen = written.decode("latin-1").split(",")
        address = _address(seen[-num_proxies]) if len(seen) >= num_proxies else None
        if address is not None:
            found["client"] = (address, 0)  # its port is nobody's here
    return found


def _address(text: str) -> str | None:
    """Without the port that some proxies write, and of ``::ffff:a.b.c.d``, as a socket for both kinds sees IPv4, what
    it stands for; None for what is no address.
    """
    for part in (text.strip(), text.rpartition(":")[0].strip()):
        with suppress(ValueError):
            found = ip_address(part.removeprefix("[").removesuffix("]"))
            mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
            return str(mapped or found)
    return None
