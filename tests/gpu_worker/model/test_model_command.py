"""``python -m gpu_worker --model``: a folder with the tiny model and a tokenizer, as a gateway meets it over Redis."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.test_command import LIMIT_S, WorkerProcess
from tests.wire.tiny_tokenizers import llama3, save_folder
from wire.messages import Finished, Grammar, Rejected, SamplingParameters, Tokens
from wire.redis_bus import RedisGatewayBus
from wire.vocabulary import load


@pytest.fixture
def model(tmp_path: Path, tiny_folder: Path) -> Path:
    """The tiny model's numbers under the names of a tokenizer: its 259 first tokens."""
    folder = save_folder(llama3(), tmp_path / "spoken")
    settings = json.loads((tiny_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"eos_token_id": 258}))
    shutil.copy(tiny_folder / "model.safetensors", folder)
    return folder


class Ear:
    """What a gateway hears: tokens with their logprobs, and ends, by response."""

    def __init__(self, gateway: RedisGatewayBus) -> None:
        self._gateway = gateway
        self.heard: dict[str, list[Any]] = {}
        self.ends: dict[str, Any] = {}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                for message in await self._gateway.receive(0.5):
                    if isinstance(message, Tokens):
                        self._hear(message)
                    elif isinstance(message, Finished | Rejected):
                        self.ends[message.response_id] = message

    def _hear(self, tokens: Tokens) -> None:
        logprobs = tokens.logprobs or (None,) * len(tokens.token_ids)
        for response_id, new, own in zip(tokens.response_ids, tokens.token_ids, logprobs, strict=True):
            self.heard.setdefault(response_id, []).extend(zip(new, own or [None] * len(new), strict=True))


async def test_a_model_folder_is_served_with_logprobs_and_grammars_and_drains_on_sigterm(
    valkey_url: str, project_root: Path, model: Path, small_worker: Any
) -> None:
    pools = ("--kv-mib=4", "--host-kv-mib=4")
    worker = WorkerProcess(valkey_url, project_root, "", "--executor=model", f"--model={model}", *pools)
    gateway = RedisGatewayBus(valkey_url, f"g-{uuid.uuid4().hex}")
    await gateway.open()
    ear = Ear(gateway)
    assert "spoken" in await asyncio.to_thread(worker.wait_for, "ready")
    words = load(model)

    async def send(name: str, sampling: SamplingParameters, **fields: Any) -> None:
        submit = small_worker.submit(name, gateway_id=gateway.gateway_id, sampling=sampling, model="spoken", **fields)
        await gateway.send(worker.worker_id, submit)

    await send("asking", SamplingParameters(temperature=0.0, num_top_logprobs=2), max_tokens=5)
    await send("held", SamplingParameters(grammar=Grammar(kind="regex", source="(yes|no)!"), seed=1), max_tokens=20)
    await send("mistaken", SamplingParameters(grammar=Grammar(kind="regex", source="(")))
    await ear.until(lambda: len(ear.ends) == 3)
    assert [len(logprob.top) for _, logprob in ear.heard["asking"]] == [2] * 5
    said = [token_id for token_id, _ in ear.heard["held"]]
    assert re.fullmatch(rb"(yes|no)!", words.decode(said[:-1]))
    assert (ear.ends["held"].choices[0].reason, said[-1]) == ("stop", 258)
    assert ear.ends["mistaken"].reason == "grammar"

    await send("long", SamplingParameters(temperature=0.0), max_tokens=300)
    await ear.until(lambda: len(ear.heard.get("long", [])) > 3)
    status = asyncio.create_task(asyncio.to_thread(worker.end, signal.SIGTERM))
    await ear.until(lambda: "long" in ear.ends)
    assert len(ear.heard["long"]) == ear.ends["long"].output_tokens == 300
    assert await status == 0
    await gateway.close()
