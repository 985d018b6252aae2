"""What weights of 8 bits cost in accuracy: perplexity of a passage in this folder, beside float32, and how often both
models would say the same next token. Knows a model file; the passage never changes, so two runs can be compared.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import machine, report, say
from gpu_worker.demo_model import DEFAULT_FOLDER, fetch
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.model_runner import layout_of
from gpu_worker.kernels.layout import BLOCK_SIZE
from gpu_worker.models.batch import Batch
from gpu_worker.models.llama import Llama
from gpu_worker.models.target import PRECISIONS, target_for
from gpu_worker.models.weights import open_weights
from scheduler_engine.plan import ScheduledRow
from scheduler_engine.request import RequestId
from wire.encoding import TextEncoder

PASSAGE = Path(__file__).parent / "passage.txt"


@torch.inference_mode()
def logits_of(path: Path, precision: str, token_ids: Sequence[int]) -> Tensor:
    """[tokens, vocabulary]: after each token, what may come next."""
    weights = open_weights(path)
    model = Llama(weights, target_for(weights.config, "cpu", precision))
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = KvCache(weights.config, num_blocks=num_blocks, num_host_blocks=0)
    row = ScheduledRow(RequestId("passage"), token_ids, 0, range(num_blocks), True, (), None)
    layout = layout_of([row], BLOCK_SIZE)
    batch = Batch(torch.tensor(token_ids), torch.from_numpy(layout.positions()), model.target.kernels.place(layout))
    return model.logits(model.forward(batch, cache.device_pool))


def perplexity(logits: Tensor, token_ids: Sequence[int]) -> float:
    """exp of the mean negative log-probability of each token after the ones before it."""
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:]))
    return math.exp(float(loss))


def measure(path: Path) -> dict[str, Any]:
    token_ids = TextEncoder.of_model(path).encode([(False, PASSAGE.read_text(encoding="utf-8"))])
    found: dict[str, Any] = {"tokens": len(token_ids)}
    best = {}
    for precision in PRECISIONS:
        started = time.process_time()
        logits = logits_of(path, precision, token_ids)
        found[precision] = {
            "perplexity": round(perplexity(logits, token_ids), 3),
            "cpu_s": round(time.process_time() - started, 1),
        }
        best[precision] = logits.argmax(dim=1)
        say(f"{precision}: perplexity {found[precision]['perplexity']}")
    found["same_next_token"] = round(float((best["full"] == best["int8"]).float().mean()), 4)
    found["ratio"] = round(found["int8"]["perplexity"] / found["full"]["perplexity"], 4)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perplexity", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or folder (the demo's model)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report({"bench": "perplexity", **measure(found.model or fetch(DEFAULT_FOLDER)), **machine()}, as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
