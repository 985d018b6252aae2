"""Bodies, frames and queries that nobody would write: no server error, no hang, and the next good request is served.

For an hour of it against a whole platform: tests/soak/test_fuzz.py.
"""

from __future__ import annotations

from typing import Any

import httpx2

from tests.gateway.spoiled import Fuzz

MODEL = "simulated"


async def test_a_hundred_spoiled_requests_and_sockets_are_refused_or_served(world: Any) -> None:
    async with httpx2.AsyncClient(base_url=world.base_url) as client:
        fuzz = Fuzz(client, world.keys["aurora"], MODEL)
        for seed in range(100):
            await fuzz.one(seed)
    await world.until(lambda: world.slots_in_use() == 0, 30)  # background responses run to their end
    answer = await world.client().chat.completions.create(**fuzz.good()["/v1/chat/completions"])
    assert answer.choices[0].message.content == "Hel"
