"""Pictures of the documents, drawn from records; each says in itself which records it was drawn from."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from scripts.evidence import field
from scripts.evidence.condensing import rows
from scripts.evidence.step import REPOSITORY
from scripts.evidence.views_inspect import inspection
from scripts.evidence.views_recall import ASKED, CONTROL, LEVEL, Swept
from scripts.evidence.views_rivals import MEASURE
from sparseattn.evaluation.by_head import Comparison, Reading
from sparseattn.evaluation.replay import Evaluation
from sparseattn.reporting.recall_tables import Recalled
from sparseattn.utils.files import write_atomic

Record: TypeAlias = "Mapping[str, Any]"

SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEYWORD = b"Records"  # of the text in a picture that holds the SHA-256 of the records it shows


@dataclass(frozen=True)
class Picture:
    """A picture below docs/.

    Args:
        records: what it shows.
        draw: takes them in a list, and the path to draw to.
        alt: what it shows, in words.
        link: of the documents that show it; the view `picture-NAME` is that line.
    """

    records: tuple[str, ...]
    draw: Callable[[Sequence[Record], Path], None]
    alt: str
    link: str

    def line(self, *_records: Record) -> str:
        """The line that shows it."""
        return f"![{self.alt}]({self.link})"

    def at(self, link: str) -> Callable[..., str]:
        """`line` of a document in another folder."""
        return replace(self, link=link).line


def frontier(records: Sequence[Record], path: Path) -> None:
    """Quality of every method of a trace against bytes and rows."""
    from sparseattn.reporting import plots

    plots.frontier([_evaluation(one) for one in rows(records[0])], path)


# Of the scores of pages, those that a picture has room for.
PAGE_SCORES = (
    *("Exact(group='softmax')", "PageMass", "Quest", "Quest(page=8, int8=True)", "Unique", "Mean(page=4, bits=8)"),
    *("Quad(page=8, bits=4)", "Clse(bits=8)", "Clse(page=8, bits=4)", "Ellipsoid(bits=4)"),
    *("LowBit(page=8)", "LowBit(bits=1, page=8)"),
)


def page_scores(records: Sequence[Record], path: Path) -> None:
    """`frontier` of `PAGE_SCORES`."""
    from sparseattn.reporting import plots

    plots.frontier([_evaluation(one) for one in rows(records[0]) if one["label"] in PAGE_SCORES], path)


def _evaluation(one: Record) -> Evaluation:
    """A measurement as `bench` has it, of its means alone."""
    means = {name.removeprefix("mean."): value for name, value in one.items() if name.startswith("mean.")}
    heads = {name: _tensor([[value]]) for name, value in means.items()}
    settings = {name: one[name] for name in ("tokens", "last", "sink", "window")}
    steps = {
        name.removeprefix("steps."): _tensor(layers)[:, None]  # [layers,1,T]: the mean over heads
        for name, layers in one.items()
        if name.startswith("steps.")
    }
    layers = tuple(one["layers"])
    return Evaluation(one["trace"], one["selector"], one["label"], one["budget"], settings, layers, heads, steps)


def _tensor(values: Sequence[Sequence[float | None]]) -> torch.Tensor:
    known = [[float("nan") if value is None else value for value in line] for line in values]
    return torch.tensor(known, dtype=torch.float64)


def layers(records: Sequence[Record], path: Path) -> None:
    """What methods recover by layer, at equal rows and at equal bytes."""
    from sparseattn.reporting import plots

    plots.by_layer([_comparison(one) for one in records[0]["by_layer"]], path)


def _comparison(one: Record) -> Comparison:
    """A comparison as `bench --by-layer` has it, of the means of layers alone."""
    readings = {}
    for method in one["methods"]:
        heads = {"recovered": _tensor([[value] for value in method["recovered"]])}
        of = Evaluation(one["trace"], method["selector"], method["label"], None, {}, tuple(one["layers"]), heads)
        readings[method["label"]] = Reading(of, of)
    return Comparison(one["equal"], one["at"], readings)


def inspected(records: Sequence[Record], path: Path) -> None:
    """Distances, shares and pages of a trace by layer."""
    from sparseattn.reporting import plots

    plots.inspection(inspection(records[0]), path)


def recall(records: Sequence[Record], path: Path) -> None:
    """Recall against keys scanned, of the most keys of each record."""
    from sparseattn.reporting import plots

    columns = []
    for record in records:
        found = Swept(record)
        keys = found.keys[-1]
        control = {label: found.curve(label, keys, CONTROL) for label in found.labels}
        for gap in found.gaps:
            title = f"trace {found.name}, {keys:,} keys" if gap is None else f"gap {gap:g}, {keys:,} keys"
            asked = {label: found.curve(label, keys, ASKED, gap) for label in found.labels}
            columns.append(Recalled(title, asked, control))
    plots.recall(columns, LEVEL, path)


def growth(records: Sequence[Record], path: Path) -> None:
    """Keys scanned and time as the keys of a trace grow."""
    from sparseattn.reporting import plots

    found = Swept(records[0])
    lines = {
        label: [{keys: found.curve(label, keys, direction) for keys in found.keys} for direction in (ASKED, CONTROL)]
        for label in found.labels
    }
    plots.scaling([ASKED, CONTROL], lines, LEVEL, path, found.name)


def agreement(records: Sequence[Record], path: Path) -> None:
    """Divergence from full attention against rows and bytes."""
    from sparseattn.reporting import plots

    windows = [
        {**one, "settings": record["settings"], "prompt": f"{one['text']} {one['start']}"}
        for record in records
        for one in rows(record)
    ]
    plots.agreement(windows, path)


def accuracy(records: Sequence[Record], path: Path) -> None:
    """Score against budget."""
    from sparseattn.reporting import plots

    (record,) = records
    shown = [one for one in rows(record) if one["method"] not in ("Random", "Quest(group='each')")]
    plots.accuracy([{**one, "settings": record["settings"]} for one in shown], path)


def steps(records: Sequence[Record], path: Path) -> None:
    """Recall of the best rows at every decoded token."""
    from sparseattn.reporting import plots

    plots.by_step([_evaluation(one) for one in rows(records[0])], MEASURE, path)


def scaling(records: Sequence[Record], path: Path) -> None:
    """A step by context, batch and budget."""
    from benchmarks.scaling import picture

    picture(records[0], path)


# Name of a picture, `docs/NAME.png`.
PICTURES: dict[str, Picture] = {
    "frontier-prose": Picture(
        ("bench-prose",),
        frontier,
        "Recovered mass and output error against bytes read and rows attended, on the trace prose",
        "../frontier-prose.png",
    ),
    "layers-prose": Picture(
        ("bench-prose",),
        layers,
        "Share recovered by layer, a line a method, at equal rows and at equal bytes, on the trace prose",
        "../layers-prose.png",
    ),
    "inspect-prose": Picture(
        ("inspect-prose",),
        inspected,
        "Distances, needed rows and Quest's bounds by layer, on the trace prose",
        "../inspect-prose.png",
    ),
    "recall-traces": Picture(
        ("recall-long", "recall-prose"),
        recall,
        "Recall at 100 against the share of keys scanned, on the traces long and prose",
        "../recall-traces.png",
    ),
    "recall-growth": Picture(
        ("recall-long",),
        growth,
        "Keys scanned, and time, to reach the recall as the keys of the trace long grow",
        "../recall-growth.png",
    ),
    "recall": Picture(
        ("recall-synthetic",),
        recall,
        "Recall at 100 against the share of keys scanned, for queries and for keys, by index",
        "../recall.png",
    ),
    "agreement": Picture(
        ("agreement-smollm2-8192",),
        agreement,
        "KL divergence from full attention against rows and bytes, by text",
        "../agreement.png",
    ),
    "agreement-lowbit-smollm2": Picture(
        ("agreement-smollm2-lowbit",),
        agreement,
        "KL divergence of SmolLM2 from full attention against rows and bytes, by keys of few bits and every other "
        "method, by text",
        "agreement-lowbit-smollm2.png",
    ),
    "agreement-lowbit-gemma3": Picture(
        ("agreement-gemma3-lowbit",),
        agreement,
        "KL divergence of Gemma from full attention against rows and bytes, by keys of few bits and page scores, by "
        "text",
        "agreement-lowbit-gemma3.png",
    ),
    "pages-smollm2": Picture(
        ("pages-smollm2",),
        page_scores,
        "Recovered mass and output error of SmolLM2 against bytes read and rows attended, by page scores",
        "../pages-smollm2.png",
    ),
    "pages-gemma3": Picture(
        ("pages-gemma3",),
        page_scores,
        "Recovered mass and output error of Gemma against bytes read and rows attended, by page scores",
        "../pages-gemma3.png",
    ),
    "rivals-hashed-smollm2": Picture(
        ("rivals-hashed-smollm2",),
        frontier,
        "Recovered mass and output error of SmolLM2 against bytes read and rows attended, by methods that hash keys",
        "../rivals-hashed-smollm2.png",
    ),
    "rivals-hashed-gemma3": Picture(
        ("rivals-hashed-gemma3",),
        frontier,
        "Recovered mass and output error of Gemma against bytes read and rows attended, by methods that hash keys",
        "../rivals-hashed-gemma3.png",
    ),
    "rivals-steps": Picture(
        ("rivals-steps",),
        steps,
        "Recall of the best ten rows at every decoded token, by methods that drop rows and by Quest",
        "../rivals-steps.png",
    ),
    "rivals-agreement-smollm2": Picture(
        ("rivals-agreement-smollm2",),
        agreement,
        "KL divergence of SmolLM2 from full attention against rows and bytes, by methods that drop rows, by text",
        "../rivals-agreement-smollm2.png",
    ),
    "rivals-agreement-gemma3": Picture(
        ("rivals-agreement-gemma3",),
        agreement,
        "KL divergence of Gemma from full attention against rows and bytes, by methods that drop rows, by text",
        "../rivals-agreement-gemma3.png",
    ),
    "field": Picture(
        ("field-smollm2", "field-gemma3"),
        field.draw,
        "KL divergence of SmolLM2 and Gemma from full attention against bytes read, the best of each family of methods",
        "../field.png",
    ),
    "eval-accuracy": Picture(
        ("eval-reference-cpu",),
        accuracy,
        "Share answered against the budget, passkey and key-value retrieval, by method",
        "../eval-accuracy.png",
    ),
    "scaling-cpu": Picture(
        ("scaling-cpu",),
        scaling,
        "Milliseconds of a step, and of its attention, by context, batch and budget, against the fastest dense "
        "attention",
        "../scaling-cpu.png",
    ),
}


def redraw(load: Callable[[str], Record], write: bool, root: Path = REPOSITORY) -> list[str]:
    """Draws the pictures that show other records than there are, or only says which; returns what is wrong."""
    wrong = []
    for name, picture in PICTURES.items():
        path = root / "docs" / f"{name}.png"
        try:
            shown = [load(one) for one in picture.records]
        except LookupError as error:
            wrong.append(f"docs/{path.name}: {error.args[0]}")
            continue
        now = stamp(shown)
        if path.exists() and stamped(path.read_bytes()) == now:
            continue
        if write:
            picture.draw(shown, path)
            write_atomic(path, marked(path.read_bytes(), now))
        else:
            wrong.append(f"docs/{path.name} was drawn from other records; draw it by --documents")
    return wrong


def stamp(records: list[Record]) -> str:
    """SHA-256 of records, however they are laid out in their files."""
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def marked(png: bytes, words: str) -> bytes:
    """The picture with `words` as a text chunk behind its header."""
    at = len(SIGNATURE) + 25  # the header is 13 bytes and 12 of a chunk's own
    body = KEYWORD + b"\0" + words.encode()
    chunk = struct.pack(">I", len(body)) + b"tEXt" + body + struct.pack(">I", zlib.crc32(b"tEXt" + body))
    return png[:at] + chunk + png[at:]


def stamped(png: bytes) -> str | None:
    """The words of `marked`, or None."""
    at = len(SIGNATURE)
    while at + 8 <= len(png):
        (size,) = struct.unpack_from(">I", png, at)
        body = png[at + 8 : at + 8 + size]
        if png[at + 4 : at + 8] == b"tEXt" and body.startswith(KEYWORD + b"\0"):
            return body.split(b"\0", 1)[1].decode()
        at += 12 + size
    return None
