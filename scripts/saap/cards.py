"""The cards of the artefacts that ship: a chapter each of the one README beside them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseattn.utils.files import write_atomic

WAYS = ("classifier", "symmetric", "oracle", "exact")


def write_card(path: Path, card: str) -> None:
    """Puts a card, whose first line is its title, in place of the one of that title, or at the end."""
    held = path.read_text() if path.is_file() else ""
    chapters = [one.strip() for one in re.split(r"(?m)^(?=# )", held) if one.strip()]
    titles = [one.splitlines()[0] for one in chapters]
    title = card.splitlines()[0]
    if title in titles:
        chapters[titles.index(title)] = card.strip()
    else:
        chapters.append(card.strip())
    write_atomic(path, ("\n\n".join(chapters) + "\n").encode())


def file_facts(path: Path) -> str:
    """Bytes and hash of a file, in words."""
    data = path.read_bytes()
    return f"{len(data):,} bytes, sha256 `{hashlib.sha256(data).hexdigest()}`"


def training_time(meta: Mapping[str, Any]) -> str:
    """How long training took, in a sentence."""
    seconds = [sum(one["seconds"].values()) for one in meta["validation"]]
    cores = meta["machine"]["cores"]
    return (
        f"Training took {sum(seconds):.0f} s, {sum(seconds) / len(seconds):.0f} s a KV head, on a machine of {cores} "
        "cores shared with other work."
    )


def validation(meta: Mapping[str, Any]) -> list[str]:
    """The validation figures that an artefact carries, and what they are: lines of Markdown."""
    shares = [str(share) for share in meta["recipe"]["shares"]]
    lines = [
        f"Share of the attention mass more than {meta['recipe']['filters']['gap']} rows back that is recovered on the "
        "held-out prompts, within a budget of rows shared by the query heads of a KV head: buckets in the order of "
        "the trained classifier, of symmetric k-means on the same centroids, and of their true mass; `exact` gives "
        "each query head the budget for itself. Mean over query heads and tokens.",
        "",
        "| layer | head | far mass | imbalance | "
        + " | ".join(f"{way}, {float(share):.0%}" for share in shares for way in WAYS)
        + " |",
        "|---:" * (4 + len(shares) * len(WAYS)) + "|",
    ]
    for one in meta["validation"]:
        cells = [one["layer"], one["head"], f"{mean(one['far_mass']):.2f}", f"{one['train']['imbalance']:.2f}"]
        cells += [f"{mean(one['recovered'][way][share]):.3f}" for share in shares for way in WAYS]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
