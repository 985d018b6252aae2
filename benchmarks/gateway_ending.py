"""How soon everything is free again that a killed gateway held, and how long a platform takes to stop under load.

Part of ``benchmarks.gateway``. Both with long answers under way whose clients keep their sockets open.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import psutil
import redis

from benchmarks.chats import ServerRefused
from benchmarks.serving import Target, own_platform

PROFILE = "cpu-smollm2"  # slow enough that no answer ends by itself meanwhile
NUM_STREAMS = 4
LIMIT_S = 60.0
ASK = {"stream": True, "max_output_tokens": 1_500, "ignore_eos": True, "input": "river"}


def measure(gateway_of: Callable[[Target], psutil.Process | None]) -> dict[str, Any]:
    """Seconds, on a platform of its own. Raises ServerRefused, OSError, RuntimeError."""
    with own_platform(["--executor=simulated", f"--device-profile={PROFILE}"]) as target:
        gateway = gateway_of(target)
        if target.data is None or gateway is None:
            raise RuntimeError("the platform's gateway was not found")
        addresses = json.loads((target.data / "services.json").read_text())
        with redis.Redis.from_url(addresses["REDIS_URL"]) as gate:
            streams = [_stream(target) for _ in range(NUM_STREAMS)]
            began = time.perf_counter()
            os.kill(gateway.pid, signal.SIGKILL)
            slot_s = _seconds_until(lambda: not _num_leases(gate), began)
            reservation_s = _seconds_until(lambda: not _open_micros(gate), began)
        streams += [_stream(target) for _ in range(NUM_STREAMS)]
        began = time.perf_counter()
    stop_s = time.perf_counter() - began
    for stream in streams:
        stream.close()
    return {
        "gateway_killed": {"slot_free_s": round(slot_s, 1), "reservation_free_s": round(reservation_s, 1)},
        "platform_stopped_s": round(stop_s, 1),
    }


def _stream(target: Target) -> socket.socket:
    """One answer under way: its first bytes have come. Waits for a gateway that has just been started again."""
    where = urlsplit(target.base_url)
    body = json.dumps({**ASK, "model": target.model}).encode()
    head = (
        f"POST /v1/responses HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {target.keys['aurora']}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    give_up = time.monotonic() + LIMIT_S
    while True:
        try:
            connection = socket.create_connection((where.hostname or "", where.port or 0), timeout=LIMIT_S)
            connection.sendall(head.encode() + body)
            first = connection.recv(65_536)
        except ConnectionError:
            first = b""
        if first.startswith(b"HTTP/1.1 200"):
            return connection
        if time.monotonic() > give_up:
            raise ServerRefused(f"no answer began within {LIMIT_S:.0f} s: {first[:300]!r}")
        time.sleep(0.1)


def _num_leases(gate: redis.Redis) -> int:
    """That have not run out."""
    seconds, microseconds = gate.time()
    now_ms = seconds * 1_000 + microseconds // 1_000
    return sum(int(gate.zcount(key, now_ms, "+inf")) for key in gate.scan_iter("rubato:lease:*", _type="zset"))


def _open_micros(gate: redis.Redis) -> int:
    return sum(int(gate.hget(key, "open") or 0) for key in gate.scan_iter("rubato:money:*"))


def _seconds_until(condition: Callable[[], bool], began: float) -> float:
    """Since ``began``. Raises RuntimeError after LIMIT_S."""
    while not condition():
        if time.perf_counter() - began > LIMIT_S:
            raise RuntimeError(f"not so within {LIMIT_S:.0f} s")
        time.sleep(0.01)
    return time.perf_counter() - began
