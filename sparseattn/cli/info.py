"""`sparseattn info`: what runs here, what a method does, or what a file holds and whether it is undamaged."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from sparseattn.cache import index_files
from sparseattn.cli.command import say
from sparseattn.cli.info_options import InfoOptions
from sparseattn.core.rope import Rope
from sparseattn.cost_model.environment import kernels, machine, versions
from sparseattn.evaluation.builtin_traces import BUILTIN
from sparseattn.reporting.table import Column, Table
from sparseattn.reporting.terminal import plain, table_screen
from sparseattn.selectors.methods import METHODS
from sparseattn.selectors.parameters import (
    channel_calibration,
    head_profile,
    layer_similarity,
    logit_fit,
    saap_artefact,
)
from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.registry import SELECTORS
from sparseattn.traces.texts import TEXTS
from sparseattn.traces.trace import Trace
from sparseattn.traces.trace_format import FORMAT, TraceError, read_header
from sparseattn.utils.tensor_files import load_tensors

SAID = ("reads", "faithful", "departs", "scans", "builds", "needs", "runs")  # of a method's row
ANCHORS = 8  # the most that a similarity is asked for
RIGHT, NONE = "right", "none: written by an earlier release"
ORIGIN = ("config_hash", "recipe", "created", "versions")  # of an artefact's meta; its figures are many


def run(options: InfoOptions) -> None:
    """Run `sparseattn info`."""
    facts = [_described(path) for path in options.files] if options.files else [_here()]
    for described in facts:
        if options.json:
            typer.echo(json.dumps(described))
        elif "damage" not in described:
            _show(described)
    damaged = [described["damage"] for described in facts if "damage" in described]
    for sentence in damaged:
        say(sentence, "red")
    if damaged:
        raise typer.Exit(2)


def _here() -> dict[str, Any]:
    return {
        "versions": versions(),
        "machine": machine(),
        "kernels": kernels(),
        "selectors": {
            name: {"family": row.family, "paper": row.paper, "reads": row.reads} for name, row in METHODS.items()
        },
        "traces": {name: trace.about for name, trace in BUILTIN.items()},
        "texts": {name: f"{text.about} ({text.licence})" for name, text in TEXTS.items()},
    }


def _show(facts: Mapping[str, Any]) -> None:
    """Print a title a fact; below it what it says."""
    out = table_screen()
    for title, value in facts.items():
        if isinstance(value, str | int):
            out.print(f"{title:9} {plain(value)}", soft_wrap=True)
            continue
        out.print(title, style="bold")
        if title == "selectors":
            table = Table("", [Column.text(head) for head in ("name", "family", "paper", "reads")])
            for name, row in value.items():
                table.add(name, *row.values())
            out.print(table)
        elif isinstance(value, dict):
            for name, what in value.items():
                out.print(f"  {plain(name):14} {plain(_words(what))}", soft_wrap=True)
        else:
            out.print(f"  {plain(', '.join(map(str, value)))}", soft_wrap=True)


def _words(value: Any) -> str:
    """Return a fact in words: `name value, name value` of an object."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(what)}" for name, what in value.items() if what is not None)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _described(path: Path) -> dict[str, Any]:
    """Return what a file holds; instead, in `damage`, a sentence where it cannot be read or is not what was written."""
    if str(path) in METHODS and not path.exists():
        return _method(str(path))
    try:
        _, metadata = read_header(path, "a trace, an artefact or an index")
        kinds = {
            FORMAT: _trace,
            saap_artefact.FORMAT: _artefact,
            index_files.FORMAT: _index,
            channel_calibration.FORMAT: _calibration,
        }
        kinds |= {layer_similarity.FORMAT: _similarity, logit_fit.FORMAT: _estimates}
        kinds |= {head_profile.FORMAT: _profile}
        kind = kinds.get(metadata.get("format", ""))
        if kind is None:
            raise TraceError(
                f"{path} is a safetensors file, but not a trace, trained index, calibration or saved index of "
                "sparseattn"
            )
        return {"file": str(path), **kind(path)}
    except ValueError as error:  # of every kind: a sentence that names the file
        return {"file": str(path), "damage": str(error)}


def _method(name: str) -> dict[str, Any]:
    """Return what is known of a method: its row, without what says nothing, and its arguments by their defaults."""
    method, kind = METHODS[name], SELECTORS[name]
    papers = [f"https://arxiv.org/abs/{number}" for number in re.findall(r"\b\d{4}\.\d{5}\b", method.paper)]
    defaults = {key: parameter.default for key, parameter in inspect.signature(kind).parameters.items()}
    return {
        "method": name,
        "class": f"sparseattn.{method.kind}",
        "family": method.family,
        "paper": ", ".join([method.paper, *papers]),
        **{key: said for key in SAID if (said := getattr(method, key))},
        "arguments": {key: None if value is inspect.Parameter.empty else value for key, value in defaults.items()},
    }


def _trace(path: Path) -> dict[str, Any]:
    trace = Trace.open(path)
    trace.verify()
    layers = {}
    for index, shape in trace.shapes.items():
        layers[str(index)] = {
            "heads": shape.heads,
            "group": shape.group,
            "size": shape.size,
            "queries": shape.queries,
            "scale": shape.scale,
            "window": shape.window,
            "rope": _rope(trace.ropes[index]),
        }
    return {
        "kind": "trace",
        "hash": NONE if trace.hashes is None else RIGHT,
        "model": str(trace.meta.get("model", "unknown")),
        "tokens": trace.tokens,
        "dtype": str(trace.dtype).removeprefix("torch."),
        "layers": layers,
        "meta": {name: what for name, what in trace.meta.items() if name != "model"},
    }


def _artefact(path: Path) -> dict[str, Any]:
    artefact = Artefact.load(path)
    layers = {}
    for index, partition in artefact.layers.items():
        heads, buckets, size = partition.centroids.shape
        learned = partition.classifier
        layers[str(index)] = {
            "heads": heads,
            "buckets": buckets,
            "size": size,
            "classifiers": 0 if learned is None else len(learned.w1),
            "hidden": None if learned is None else learned.w1.shape[1],
            "rope": _rope(artefact.ropes.get(index)),
        }
    return {
        "kind": "artefact",
        "hash": RIGHT,
        "model": str(artefact.meta.get("model", "unknown")),
        "vectors": "roped" if artefact.roped else "de-roped",
        "dtype": ", ".join(sorted({entry["dtype"] for entry in read_header(path)[0].values()})),
        "layers": layers,
        "meta": {name: artefact.meta[name] for name in ORIGIN if name in artefact.meta},
    }


def _calibration(path: Path) -> dict[str, Any]:
    calibration = Calibration.load(path)
    layers = {}
    for index, parameters in calibration.layers.items():
        shapes = {name: str(list(part.shape)) for name, part in parameters.items()}
        layers[str(index)] = {**shapes, "rope": _rope(calibration.ropes.get(index))}
    return {
        "kind": "calibration",
        "hash": RIGHT,
        "model": str(calibration.meta.get("model", "unknown")),
        "method": calibration.method,
        "vectors": "roped" if calibration.roped else "de-roped",
        "layers": layers,
        "meta": {name: calibration.meta[name] for name in ORIGIN if name in calibration.meta},
    }


def _similarity(path: Path) -> dict[str, Any]:
    similarity = layer_similarity.Similarity.load(path)
    every = range(1, min(len(similarity.layers), ANCHORS) + 1)
    return {
        "kind": "similarity of layers",
        "hash": RIGHT,
        "model": str(similarity.meta.get("model", "unknown")),
        "layers": list(similarity.layers),
        "anchors": {str(count): similarity.anchors(count) for count in every},
        "meta": {name: similarity.meta[name] for name in ORIGIN if name in similarity.meta},
    }


def _profile(path: Path) -> dict[str, Any]:
    profile = head_profile.HeadProfile.load(path)
    return {
        "kind": "profile of heads",
        "hash": RIGHT,
        "model": str(profile.meta.get("model", "unknown")),
        "gates": {str(index): " ".join(f"{gate:.2f}" for gate in each) for index, each in profile.gates().items()},
        "meta": {name: profile.meta[name] for name in ORIGIN if name in profile.meta},
    }


def _estimates(path: Path) -> dict[str, Any]:
    estimates = logit_fit.Estimates.load(path)
    return {
        "kind": "fitted estimates",
        "hash": RIGHT,
        "selector": estimates.selector,
        "layers": list(estimates.layers),
        "scale": {str(index): round(float(scale.mean()), 4) for index, (scale, _) in estimates.layers.items()},
        "meta": estimates.meta,
    }


def _index(path: Path) -> dict[str, Any]:
    metadata, tensors = load_tensors(path, index_files.FORMAT, index_files.VERSION, "an index of sparseattn")
    return {
        "kind": "index",
        "hash": RIGHT,
        **{name: metadata[name] for name in ("selector", "arguments", "rows") if name in metadata},
        "tensors": {name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in tensors.items()},
    }


def _rope(rope: Rope | None) -> str | None:
    if rope is None:
        return None
    return f"{rope.rotated} dimensions, {'interleaved' if rope.interleaved else 'halves'}"
