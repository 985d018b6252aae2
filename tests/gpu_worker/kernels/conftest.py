"""One fixture: the device on which kernels run here."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A CPU where kernels are interpreted, a GPU where they are compiled."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted != (request.param == "interpreter"):
        pytest.skip("kernels are interpreted where there is no GPU, compiled where there is one")
    return torch.device("cpu" if interpreted else "cuda")
