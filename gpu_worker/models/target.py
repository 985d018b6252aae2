"""Where and how precisely a model is computed: device, numbers, kernels and linear layers, chosen in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor

from gpu_worker.kernels.choice import Kernels, kernels_for
from gpu_worker.kernels.layout import BLOCK_SIZE
from gpu_worker.models import int8_linear
from gpu_worker.models.batch import pool_shape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.linear import PackedLinear
from gpu_worker.models.weights import WeightsError

PRECISIONS = ("full", "int8")

Linear = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class Target:
    """Always: ``kernels`` run on ``device``; ``dtype`` is that of hidden states and of the pool."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    make_linear: MakeLinear

    @property
    def described(self) -> str:
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            return f"computes on {name} in bfloat16; its streams and graphs have no test that runs without a GPU"
        weights = "8 bits" if self.make_linear is int8_linear.Int8Linear else "float32"
        threads = torch.get_num_threads()
        return f"computes on {threads} CPU threads in float32, weights in {weights}; {self.kernels.described}"

    def put(self, weight: Tensor) -> Tensor:
        """On the device, in its precision."""
        return weight.to(self.device, self.dtype)


def target_for(
    config: ModelConfig, device: str = "cpu", precision: str = "full", *, spare_weights: bool = False
) -> Target:
    """``device`` cpu, cuda or auto (cuda where there is one). CPUs compute in float32, CUDA devices in bfloat16.

    ``spare_weights``: a CPU in float32 holds a second copy of the weights, which is quicker for a single row. Raises
    WeightsError when ``precision`` is int8 and the device cannot.
    """
    chosen = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    if precision == "int8":
        if chosen.type == "cuda":
            raise WeightsError("int8 weights are for CPUs; a CUDA device computes in bfloat16: leave --weights away")
        if not int8_linear.is_available():
            raise WeightsError("this build of torch has no int8 product for this CPU: leave --weights away")
    kernels = kernels_for(chosen, pool_shape(config, BLOCK_SIZE))
    if chosen.type == "cuda":
        return Target(chosen, torch.bfloat16, kernels, plain_linear)
    if precision == "int8":
        return Target(chosen, torch.float32, kernels, int8_linear.Int8Linear)
    return Target(chosen, torch.float32, kernels, partial(PackedLinear, with_spare=spare_weights))


def plain_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """``x @ weight.T + bias`` by the device's own library."""
    return lambda rows: functional.linear(rows, weight, bias)
