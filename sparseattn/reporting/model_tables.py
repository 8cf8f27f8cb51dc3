"""What `machine --model` shows: whether a model's decode step fits a machine's memory, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

from sparseattn.cost_model.model_steps import Load, MethodStep
from sparseattn.evaluation.measures import Format
from sparseattn.reporting.table import Column, Table


def machine_line(load: Load) -> str:
    """Return what the machine is, and that all that follows is a prediction."""
    machine = load.machine
    memory = "memory not known" if machine.memory is None else f"{_gb(machine.memory)} of memory"
    basis = "its data sheet" if machine.predicted else "what was measured of it"
    return (
        f"Predicted from {basis}, not measured: {machine.name}, {memory}, {machine.bandwidth / 1e9:,.0f} GB/s "
        f"({machine.source})"
    )


def memory_lines(load: Load) -> list[str]:
    """Return what the model, the KV cache and the weights take, and whether they fit."""
    model, weights = load.model, load.model.weights
    active = f", {_billions(weights.active)} of them active for a token" if weights.experts else ""
    sliding = (
        f", of {model.full} layers; {model.sliding} more keep a window of {model.window:,} tokens"
        if model.sliding
        else ""
    )
    token = model.full * model.num_kv_heads * model.attention(1, load.dtype).row_bytes
    lines = [
        f"{model.name}: {_billions(weights.count)} parameters{active}, {_gb(weights.total)} of weights",
        f"KV cache: {token:,} bytes a token in {str(load.dtype).removeprefix('torch.')}{sliding}; "
        f"{_gb(model.kv_bytes(load.context, load.dtype))} for {load.context:,} tokens, "
        f"{_gb(load.kv_bytes)} for {_sequences(load.batch)}",
        _fit(load),
    ]
    if model.longest is not None and load.context > model.longest:
        lines.append(f"{model.name} was made for {model.longest:,} tokens at most")
    if model.note:
        lines.append(f"{model.name}: {model.note}")
    return lines


def steps_table(load: Load, steps: Sequence[MethodStep], budget: str) -> Table:
    """Return a row for each method: the step of all layers with the weights' part, and the index in memory."""
    weights = load.model.weights
    choice = ", if tokens choose their experts at random" if weights.experts and load.batch > 1 else ""
    out = Table(
        f"Predicted decode step, budget {budget}. Each step reads {_gb(weights.read(load.batch))} of weights{choice}: "
        f"{1e3 * load.weights_seconds():.1f} ms",
        [
            Column.text("method"),
            Column("step ms", Format(1, 1e3)),
            Column("times dense", Format(1)),
            Column("attention ms", Format(1, 1e3)),
            Column("index GB", Format(1, 1e-9)),
            Column("most batch"),
        ],
    )
    for step in steps:
        out.add(step.method, step.seconds, step.times, step.attention, step.index, step.largest_batch)
    notes = [f"{step.method} is predicted as if {step.assumed}" for step in steps if step.assumed]
    notes += [f"{step.method} is not predicted: {step.reason}" for step in steps if step.reason]
    if load.fits():
        notes += [f"{step.method} does not fit with its index" for step in steps if step.fits is False]
    out.note = "\n".join(notes)
    return out


def _fit(load: Load) -> str:
    """Return whether weights and KV cache fit, and what does."""
    memory = load.machine.memory
    if memory is None:
        return f"With the weights {_gb(load.held())}; the memory of {load.machine.name} is not known"
    whole = f"With the weights {_gb(load.held())} of {_gb(memory)}"
    most, longest = load.largest_batch(), load.largest_context()
    if not longest:
        return f"{whole}: does not fit, since the weights leave no room"
    at = f"{_sequences(load.batch)} of {longest:,} tokens"
    if load.fits():
        return f"{whole}: fits. The most that fits is {_sequences(most or 0)} of {load.context:,} tokens, or {at}"
    if not most:
        return f"{whole}: does not fit, not even one sequence of {load.context:,} tokens. What fits is {at}"
    return f"{whole}: does not fit. What fits is {_sequences(most)} of {load.context:,} tokens, or {at}"


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count:,} sequences"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB".replace(".0 GB", " GB")


def _billions(count: float) -> str:
    return f"{count / 1e9:.3g} billion"
