"""transformers' continuous batching on a random model of the same shape and a load like the flood's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.device import Machine
from gpu_worker.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all come at once; ``prompt`` and ``output`` tokens each. ``cache``: its own choice when empty."""

    requests: int = 256
    prompt: int = 512
    output: int = 128
    cache: Mapping[str, int] = field(default_factory=dict)


REHEARSAL = Load(requests=2, prompt=5, output=2, cache={"num_blocks": 4, "max_batch_tokens": 16, "page_size": 16})


def measure(config: ModelConfig, machine: Machine, load: Load) -> dict[str, Any] | str:
    """Output tokens per second, or a sentence that says why there are none."""
    try:
        from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        return f"not measured: {error}"
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=config.tied_embeddings,
        dtype=machine.dtype,
    )
    with torch.device(machine.device):
        model = LlamaForCausalLM(settings).to(machine.dtype).eval()
    wanted = GenerationConfig(max_new_tokens=load.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[(31 * i + 7 * j + 1) % 256 for j in range(load.prompt)] for i in range(load.requests)]
    try:
        started_s = time.perf_counter()
        answers = model.generate_batch(
            inputs=prompts,
            generation_config=wanted,
            continuous_batching_config=ContinuousBatchingConfig(**load.cache),
        )
        seconds = time.perf_counter() - started_s
        tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, ImportError) as error:
        return f"not measured: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return {"requests": len(answers), "tokens_per_s": round(tokens / seconds, 1), "seconds": round(seconds, 1)}
