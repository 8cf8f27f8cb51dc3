"""What `machine --model` shows: whether a model's decode step fits a machine's memory, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

from sparseattn.cost_model.model_steps import MethodStep, Workload
from sparseattn.evaluation.measure_table import Format
from sparseattn.reporting.table import Column, Table


def machine_line(workload: Workload) -> str:
    """Return what the machine is, and that all that follows is a prediction."""
    machine = workload.machine
    memory = "memory not known" if machine.memory is None else f"{_gb(machine.memory)} of memory"
    basis = "its data sheet, not measured" if machine.predicted else "speeds that were measured on it"
    return f"Predicted from {basis}: {machine.name}, {memory}, {machine.bandwidth / 1e9:,.0f} GB/s ({machine.source})"


def memory_lines(workload: Workload) -> list[str]:
    """Return what the model, the KV cache and the weights take, and whether they fit."""
    model, weights = workload.model, workload.model.weights
    active = f", of which a token uses {_billions(weights.active)}" if weights.experts else ""
    sliding = (
        f", in {model.full} layers; {model.sliding} others keep only a window of {model.window:,} tokens"
        if model.sliding
        else ""
    )
    token = model.full * model.num_kv_heads * model.attention(1, workload.dtype).row_bytes
    lines = [
        f"{model.name}: {_billions(weights.count)} parameters{active}; the weights take {_gb(weights.total)}",
        f"KV cache: {token:,} bytes per token in {str(workload.dtype).removeprefix('torch.')}{sliding}; "
        f"{_gb(model.kv_bytes(workload.context, workload.dtype))} for {workload.context:,} tokens, "
        f"{_gb(workload.kv_bytes)} for {_sequences(workload.batch)}",
        _fit(workload),
    ]
    if model.longest is not None and workload.context > model.longest:
        lines.append(f"{model.name} was made for at most {model.longest:,} tokens")
    if model.note:
        lines.append(f"{model.name}: {model.note}")
    return lines


def steps_table(workload: Workload, steps: Sequence[MethodStep], budget: str) -> Table:
    """Return a row for each method: the step of all layers with the weights' part, and the index in memory."""
    weights = workload.model.weights
    choice = ", if tokens choose their experts at random" if weights.experts and workload.batch > 1 else ""
    read = f"Each step reads {_gb(weights.read(workload.batch))} of weights{choice}"
    out = Table(
        f"Predicted decode step at budget {budget}. {read} in {1e3 * workload.weights_seconds():.1f} ms",
        [
            Column.text("method"),
            Column("step ms", Format(1, 1e3)),
            Column("speed-up", Format(1)),
            Column("attention ms", Format(1, 1e3)),
            Column("index GB", Format(1, 1e-9)),
            Column("most sequences"),
        ],
    )
    for step in steps:
        out.add(step.method, step.seconds, step.times, step.attention, step.index, step.largest_batch)
    notes = [f"The prediction for {step.method} assumes that {step.assumed}." for step in steps if step.assumed]
    notes += [f"There is no prediction for {step.method}: {step.reason}" for step in steps if step.reason]
    if workload.fits():
        notes += [f"{step.method} does not fit the memory with its index." for step in steps if step.fits is False]
    out.note = "\n".join(notes)
    return out


def _fit(workload: Workload) -> str:
    """Return whether weights and KV cache fit, and what does."""
    memory = workload.machine.memory
    if memory is None:
        return f"Weights and KV cache: {_gb(workload.held())}; the memory of {workload.machine.name} is not known"
    whole = f"Weights and KV cache: {_gb(workload.held())} of {_gb(memory)}"
    most, longest = workload.largest_batch(), workload.largest_context()
    if not longest:
        return f"{whole}. This does not fit: the weights leave no room"
    at = f"{_sequences(workload.batch)} of {longest:,} tokens"
    if workload.fits():
        return f"{whole}. This fits. Most that fits: {_sequences(most or 0)} of {workload.context:,} tokens, or {at}"
    if not most:
        return f"{whole}. This does not fit, not even one sequence of {workload.context:,} tokens. What fits: {at}"
    return f"{whole}. This does not fit. What fits: {_sequences(most)} of {workload.context:,} tokens, or {at}"


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count:,} sequences"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB".replace(".0 GB", " GB")


def _billions(count: float) -> str:
    return f"{count / 1e9:.3g} billion"
