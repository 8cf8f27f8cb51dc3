"""Where a step in vLLM goes: what is made of the clocks."""

from __future__ import annotations

import time

import pytest

from benchmarks.vllm import removed
from benchmarks.vllm_parts import Parts


def test_parts_of_a_layer_are_what_its_clocks_say() -> None:
    parts = Parts()
    parts.seconds.update({
        "step": 0.8, "tables": 4e-3, "layer": 0.12, "stock": 0.02, "choosing": 0.03, "attending": 0.04,
        "counting": 0.01, "kernel attend": 0.03,
    })  # fmt: skip
    told = parts.of_layers(steps=10, layers=20)
    assert told["layer"] == 500  # without stock's part of it
    assert (told["choosing"], told["attending"], told["both"], told["counting"]) == (150, 200, 0, 50)
    assert told["around"] == 100, "what no other part is"
    assert told["kernels"] == {"attend": 150}
    assert (told["tables"], told["step"]) == (400, 80_000), "of a step, not of a layer"


def test_a_clock_counts_what_ends_in_an_error_too() -> None:
    parts = Parts()

    def fails() -> None:
        time.sleep(0.01)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            parts.clocked("step", fails)()
    assert parts.calls["step"] == 2
    assert parts.seconds["step"] >= 0.02


def test_attention_removed_is_of_what_stock_takes_beyond_short_sequences() -> None:
    def seconds(stock: float, sparse: float) -> dict[str, dict[str, dict[str, float]]]:
        return {"seconds": {"stock": {"median": stock}, "sparse": {"median": sparse}}}

    short = {"seconds": {"median": 0.05}}
    assert removed(seconds(0.15, 0.05), short) == 1
    assert removed(seconds(0.15, 0.09), short) == 0.6
    assert removed(seconds(0.15, 0.2), short) == -0.5, "slower than stock"
