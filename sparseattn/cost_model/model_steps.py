"""What a decode step of a whole model takes on a machine, dense and by method, and whether it fits its memory.

A step reads the weights once and attends in every layer; sliding layers stay dense. Nothing else of a model is counted:
launches of its products, norms and sampling, activations in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparseattn.core.budget import Budget
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.core.step_cost import dense_cost, step_cost
from sparseattn.cost_model.index_bytes import SINK, WINDOW, IndexBytes, index_bytes
from sparseattn.cost_model.machine import Machine
from sparseattn.cost_model.model_shape import ModelShape
from sparseattn.selectors.base import Selector
from sparseattn.selectors.registry import make_selector

DENSE = "dense"
FAR = 1 << 40  # tokens beyond any context


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's decode step on a machine: how many sequences of how many tokens, in what dtype.

    Args:
        machine, model: see there.
        context: tokens of each sequence.
        batch: sequences.
        dtype: of keys and values.
    """

    machine: Machine
    model: ModelShape
    context: int
    batch: int
    dtype: torch.dtype

    @property
    def kv_bytes(self) -> int:
        """Of all sequences."""
        return self.batch * self.model.kv_bytes(self.context, self.dtype)

    def held(self, index: IndexBytes | None = None) -> float:
        """Return the bytes in memory: weights, KV cache and index."""
        beside = 0.0 if index is None else self.batch * self.model.full * index.at(self.context)
        return self.model.weights.total + self.kv_bytes + beside

    def fits(self, index: IndexBytes | None = None) -> bool:
        """Return whether it fits; a machine whose memory is not known is taken to have room."""
        return self.machine.memory is None or self.held(index) <= self.machine.memory

    def largest_batch(self, index: IndexBytes | None = None) -> int | None:
        """Return how many sequences of this context fit; None where the machine's memory is not known."""
        if self.machine.memory is None:
            return None
        free = self.machine.memory - self.model.weights.total
        bytes_each = replace(self, batch=1).held(index) - self.model.weights.total
        return max(math.floor(free / bytes_each), 0)

    def largest_context(self) -> int | None:
        """Return how many tokens of each of these sequences fit; None where the machine's memory is not known.

        Where all layers slide, any number of tokens fits; the longest context that the model was made for is returned.
        """
        if self.machine.memory is None:
            return None
        low, high = 0, FAR
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if replace(self, context=middle).fits() else (low, middle - 1)
        return low if low < FAR else self.model.longest

    def weights_seconds(self) -> float:
        """Return what the products with the weights take in a step."""
        weights = self.model.weights
        return self.machine.product_seconds(weights.read(self.batch), weights.flops(self.batch), self.dtype)

    def dense_seconds(self) -> float:
        """Return what full attention takes in all layers."""
        shape = self.model.attention(self.batch, self.dtype)
        return self.model.full * self.machine.seconds(dense_cost(shape, self.context)) + self._sliding_seconds()

    def sparse_seconds(self, selector: Selector, budget: Budget) -> tuple[float, str]:
        """Return what attention takes in all layers with a method, and what of it the data decide.

        Raises:
            ValueError: a method that does not serve such a layer, that does not say what choosing costs, or that the
                machine does not run.
        """
        shape = self.model.attention(self.batch, self.dtype)
        prepared = selector.for_layer(LayerContext(0, rope=Rope.of(shape.size)))
        prepared.check_shape(shape.heads, shape.group, shape.size)
        cost = step_cost(prepared, shape, self.context, budget, sink=SINK, window=WINDOW)
        return self.model.full * self.machine.seconds(cost) + self._sliding_seconds(), cost.expected

    def _sliding_seconds(self) -> float:
        model = self.model
        if not model.sliding:
            return 0.0
        rows = min(self.context, model.window)
        return model.sliding * self.machine.seconds(dense_cost(model.attention(self.batch, self.dtype), rows))


@dataclass(frozen=True, slots=True)
class MethodStep:
    """A method's step of the whole model.

    Args:
        method: as it is typed; "dense" for full attention.
        attention: seconds of all layers' attention; None for a step that does not fit, or cannot be predicted.
        seconds: with the weights' part.
        times: how many times as fast as the dense step.
        index: bytes of all layers and sequences; None where they are not known.
        fits: whether weights, cache and index fit the memory.
        largest_batch: sequences that do.
        assumed: what the prediction assumes of the data.
        reason: why there is no prediction.
    """

    method: str
    attention: float | None = None
    seconds: float | None = None
    times: float | None = None
    index: float | None = None
    fits: bool | None = None
    largest_batch: int | None = None
    assumed: str = ""
    reason: str = ""


def method_steps(workload: Workload, methods: Sequence[str], budget: Budget) -> list[MethodStep]:
    """Return the dense step and each method's.

    Args:
        workload: what is decoded, and where.
        methods: as they are typed.
        budget: as of `decode`.

    Raises:
        ValueError: an unknown method, or no method that can be predicted.
    """
    dense = workload.dense_seconds()
    steps = [_step(workload, DENSE, dense, dense, IndexBytes(0.0, 0.0), "")]
    for method in methods:
        selector, model = make_selector(method), workload.model
        try:
            attention, assumed = workload.sparse_seconds(selector, budget)
            index = index_bytes(method, model.num_kv_heads, model.group, model.head_dim, workload.dtype)
        except ValueError as error:
            steps.append(MethodStep(method, reason=str(error)))
        else:
            steps.append(_step(workload, method, attention, dense, index, assumed))
    if methods and all(step.reason for step in steps[1:]):
        raise ValueError(f"{steps[1].method}: {steps[1].reason}")
    return steps


def _step(
    workload: Workload, method: str, attention: float, dense: float, index: IndexBytes, assumed: str
) -> MethodStep:
    """Return a step whose attention takes so many seconds, where full attention takes `dense`."""
    weights, fits = workload.weights_seconds(), workload.fits(index)
    return MethodStep(
        method,
        attention=attention if fits else None,
        seconds=weights + attention if fits else None,
        times=(weights + dense) / (weights + attention) if fits else None,
        index=workload.batch * workload.model.full * index.at(workload.context),
        fits=fits,
        largest_batch=workload.largest_batch(index),
        assumed=assumed,
    )


def record(workload: Workload, steps: Sequence[MethodStep]) -> dict[str, Any]:
    """Return a workload and its steps as JSON holds them, numbers to four digits."""
    model, weights = workload.model, workload.model.weights
    return {
        "model": model.name,
        "source": model.source,
        "note": model.note,
        "parameters": weights.count,
        "active_parameters": weights.active,
        "weights_bytes": round(weights.total),
        "weights_read_bytes": round(weights.read(workload.batch)),
        "weights_seconds": _digits(workload.weights_seconds()),
        "layers": model.full,
        "sliding_layers": model.sliding,
        "sliding_window": model.window,
        "num_kv_heads": model.num_kv_heads,
        "group": model.group,
        "head_dim": model.head_dim,
        "longest_context": model.longest,
        "context": workload.context,
        "batch": workload.batch,
        "kv_bytes_per_sequence": model.kv_bytes(workload.context, workload.dtype),
        "kv_bytes": workload.kv_bytes,
        "fits": workload.fits(),
        "largest_batch": workload.largest_batch(),
        "largest_context": workload.largest_context(),
        "steps": [
            {
                "selector": step.method,
                "attention_seconds": _digits(step.attention),
                "seconds": _digits(step.seconds),
                "times_dense": _digits(step.times),
                "index_bytes": None if step.index is None else round(step.index),
                "step_fits": step.fits,
                "most_sequences": step.largest_batch,
                "assumed": step.assumed,
                "reason": step.reason,
            }
            for step in steps
        ],
    }


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
