"""From a model's file to an executor with its two pools: how much memory each gets. Knows sizes; runs nothing."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch

from gpu_worker.device import cuda_device, large_pages
from gpu_worker.device.kv_cache import KvCache, bytes_per_block
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.executor import ExecutorShape
from gpu_worker.kernels.layout import BLOCK_SIZE
from gpu_worker.models.linear import keep_few_shapes
from gpu_worker.models.llama import Llama
from gpu_worker.models.target import target_for
from gpu_worker.models.weights import WeightsError, open_weights

MIB = 1 << 20
CPU_KV_MIB = 512  # of a CPU's memory, which is not the worker's own: a KV pool where none is asked for


def build(
    model_path: str | Path,
    *,
    kv_mib: int | None,
    host_kv_mib: int,
    threads: int,
    device: str = "cpu",
    precision: str = "full",
    spare_weights: bool = False,
) -> ModelExecutor:
    """Loads the model. Raises ModelFileError with a sentence. ``threads`` is the whole process's; 0 leaves it.

    ``device``, ``precision`` and ``spare_weights`` as ``models.target`` takes them. ``kv_mib`` None: what a CUDA device
    has free, less its margin, or CPU_KV_MIB.
    """
    keep_few_shapes()
    if threads:
        torch.set_num_threads(threads)
    weights = open_weights(Path(model_path))
    model = Llama(weights, target_for(weights.config, device, precision, spare_weights=spare_weights))
    _return_freed_memory()
    if model.target.device.type == "cpu":
        large_pages.collapse()
    return assemble(model, kv_mib=kv_mib, host_kv_mib=host_kv_mib)


def assemble(model: Llama, *, kv_mib: int | None, host_kv_mib: int) -> ModelExecutor:
    """A model and its two pools. Raises WeightsError when the device's holds not a single block."""
    target = model.target
    block_bytes = bytes_per_block(model.config, BLOCK_SIZE, target.dtype)
    if kv_mib is not None:
        pool_bytes = kv_mib * MIB
    elif target.device.type == "cuda":
        pool_bytes = cuda_device.pool_bytes()
    else:
        pool_bytes = CPU_KV_MIB * MIB
    shape = ExecutorShape(
        num_blocks=pool_bytes // block_bytes,
        num_host_blocks=host_kv_mib * MIB // block_bytes,
        block_size=BLOCK_SIZE,
        bytes_per_block=block_bytes,
        max_model_len=model.config.context_length,
        copies_in_order=True,
    )
    if not shape.num_blocks:
        raise WeightsError(f"a KV pool of {pool_bytes // MIB} MiB holds not even one block of {block_bytes:,} bytes")
    cache = KvCache(model.config, num_blocks=shape.num_blocks, num_host_blocks=shape.num_host_blocks, target=target)
    return ModelExecutor(model, cache, shape)


def _return_freed_memory() -> None:
    """glibc keeps what loading a model has freed (100 MB for 135 M weights) until it is asked to return it."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
