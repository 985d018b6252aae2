"""Weights of 8 bits on a CPU: near the full product, the same for a row whatever is beside it, refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from gpu_worker.device.building import build
from gpu_worker.models import int8_linear
from gpu_worker.models.int8_linear import Int8Linear
from gpu_worker.models.target import target_for
from gpu_worker.models.weights import WeightsError, open_weights

ROUTES = [
    (pack, largest)
    for pack in (int8_linear._pack_onednn, int8_linear._pack_fbgemm)
    for largest in (int8_linear.LARGEST, int8_linear.LARGEST_OF_PAIRS)
]


@pytest.fixture(params=ROUTES, ids=["oneDNN 8", "oneDNN 7", "FBGEMM 8", "FBGEMM 7"])
def _route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not int8_linear.is_exact(*request.param):
        pytest.skip("this CPU adds products of bytes in 16 bits")
    monkeypatch.setattr(int8_linear, "_packing", lambda: request.param)


def test_every_cpu_has_a_product_that_sums_exactly() -> None:
    assert int8_linear.is_available()


@pytest.mark.usefixtures("_route")
def test_a_product_is_near_the_full_one_and_a_row_is_the_same_in_any_batch() -> None:
    torch.manual_seed(0)
    weight, bias, rows = torch.randn(70, 96), torch.randn(70), torch.randn(9, 96)
    rows[3] *= 1_000  # beside a loud row a quiet one keeps its digits
    rows[5] = 0
    linear = Int8Linear(weight, bias)
    found, expected = linear(rows), functional.linear(rows, weight, bias)
    apart = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert apart.max() < 0.02
    assert torch.equal(found[5], bias)
    alone = torch.cat([linear(rows[i : i + 1]) for i in range(9)])
    assert ((alone - found).abs() <= 3e-7 * found.abs().amax(dim=1, keepdim=True)).all()  # the last rounding may differ


def test_a_model_in_8_bits_says_the_same_alone_batched_chunked_swapped_and_recomputed(
    tiny_folder: Path, drive: Any
) -> None:
    executor = build(tiny_folder, kv_mib=4, host_kv_mib=4, threads=0, precision="int8")
    driver, prompt = drive(executor), [(7 * index + 3) % 259 for index in range(37)]
    expected = list(driver.run(driver.add("alone", prompt), 16))
    assert driver.run(driver.add("chunked", prompt), 16, 7) == expected
    sequence, others = driver.add("batched", prompt), [driver.add(str(i), [i + 1] * 9) for i in range(5)]
    for wanted in (5, 10, 16):
        while len(sequence.output) < wanted:
            driver.step([*others, sequence], chunk=12)
            driver.through_the_host(sequence)
        driver.drop(sequence)
    assert sequence.output == expected


def test_8_bits_are_refused_where_they_cannot_be_had(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_weights(tiny_folder).config
    with pytest.raises(WeightsError, match="int8 weights are for CPUs"):
        target_for(config, "cuda", "int8")
    monkeypatch.setattr(int8_linear, "_packing", lambda: None)
    with pytest.raises(WeightsError, match="no int8 product for this CPU"):
        target_for(config, "cpu", "int8")
