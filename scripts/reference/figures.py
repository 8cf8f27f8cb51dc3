"""What the exported weights can do: recurring spans by distance, text, questions, and where attention looks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

from scripts.reference.curriculum import RowMaker, Stage
from scripts.reference.lookups import lookups
from scripts.reference.model import VOCABULARY
from scripts.reference.text import Corpus


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Copies whose distance lies in [low, high), in ``rows`` sequences of ``length`` tokens."""

    low: int
    high: int
    length: int
    rows: int


BUCKETS = (
    Bucket(16, 64, 1536, 16),
    Bucket(64, 256, 1536, 16),
    Bucket(256, 512, 1536, 16),
    Bucket(512, 1025, 1536, 24),
    Bucket(1025, 2048, 2560, 16),
    Bucket(2048, 4096, 4608, 12),
    Bucket(4096, 8192, 8704, 8),
)
COPIES_PER_ROW = 16


def planted_row(
    rng: np.random.Generator, bucket: Bucket, background: np.ndarray, fresh: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Copy spans of 6 to 20 bytes to a distance drawn from the bucket; return the tokens and the offsets in copies.

    With ``fresh`` the sources are overwritten with random bytes first (needed where the background is text).
    Targets lie in the last part of the row, in slots of equal size, so that they never overlap; sources avoid targets.
    """
    tokens = background.copy()
    offset: np.ndarray = np.zeros(bucket.length, dtype=np.int64)
    taken: np.ndarray = np.zeros(bucket.length, dtype=bool)
    first = min(bucket.low + 32, bucket.length - 512)
    slot = (bucket.length - first) // COPIES_PER_ROW
    for index in range(COPIES_PER_ROW):
        for _ in range(50):
            size = int(rng.integers(6, 21))
            at = first + index * slot + int(rng.integers(slot - size + 1))
            source = at - int(rng.integers(bucket.low, min(bucket.high, at + 1)))
            clear = source >= 0 and source + size <= at
            if clear and not taken[source : source + size].any() and not taken[at : at + size].any():
                break
        else:
            continue
        if fresh:
            tokens[source : source + size] = rng.integers(VOCABULARY, size=size)
        tokens[at : at + size] = tokens[source : source + size]
        offset[at : at + size] = np.arange(size)
        # A source is taken too: a later one written over it would undo this copy.
        taken[source : source + size] = taken[at : at + size] = True
    return tokens, offset


def longest_match(tokens: np.ndarray, at: int) -> int:
    """Predict ``tokens[at]`` by what followed the longest earlier occurrence of the bytes before it (the latest such).

    It stands beside the model's accuracy to show what can be had at all: the second byte of a copy has one byte of
    context only, which occurs by chance elsewhere in a long context.
    """
    candidates = np.flatnonzero(tokens[: at - 1] == tokens[at - 1])
    if not len(candidates):
        return -1
    for depth in range(1, 24):
        deeper = candidates[candidates >= depth]
        deeper = deeper[tokens[deeper - depth] == tokens[at - 1 - depth]]
        if not len(deeper):
            break
        candidates = deeper
    return int(tokens[candidates[-1] + 1])


def predictions(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model(input_ids=ids, use_cache=False).logits[0].argmax(-1).numpy()


@torch.no_grad()
def induction(model: LlamaForCausalLM, bucket: Bucket, text: np.ndarray | None, seed: int) -> dict[str, float]:
    """Return accuracies on copies in one bucket: the model's by offset, and the longest match's.

    Positions are contiguous. Without ``text`` the background is uniform random bytes.
    """
    rng = np.random.default_rng((seed, bucket.low))
    hits: list[np.ndarray] = []
    best: list[bool] = []
    offsets: list[np.ndarray] = []
    for _ in range(bucket.rows):
        if text is None:
            background = rng.integers(VOCABULARY, size=bucket.length).astype(np.uint8)
        else:
            start = int(rng.integers(len(text) - bucket.length))
            background = text[start : start + bucket.length]
        tokens, offset = planted_row(rng, bucket, background, fresh=text is not None)
        places = np.flatnonzero(offset > 0)
        guesses = predictions(model, tokens)[places - 1]
        hits.append(guesses == tokens[places])
        best.extend(longest_match(tokens, int(place)) == tokens[place] for place in places)
        offsets.append(offset[places])
    hit, offset = np.concatenate(hits), np.concatenate(offsets)
    return {
        "low": bucket.low,
        "high": bucket.high - 1,
        "length": bucket.length,
        "tokens": len(hit),
        "accuracy": float(hit.mean()),
        "second": float(hit[offset == 1].mean()),
        "third": float(hit[offset == 2].mean()),
        "later": float(hit[offset >= 3].mean()),
        "matcher": float(np.mean(best)),
    }


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, text: np.ndarray, length: int, rows: int) -> float:
    """Return the loss on held-out text, in ``rows`` windows spread evenly over it."""
    losses = []
    for start in np.linspace(0, len(text) - length, rows).astype(int):
        ids = torch.from_numpy(text[start : start + length].astype(np.int64))[None]
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss.item())
    return float(np.mean(losses)) / math.log(2)


@torch.no_grad()
def attention_shares(
    model: LlamaForCausalLM, tokens: np.ndarray, beyond: int = 64, heaviest: int = 64, last: int = 1024
) -> dict[str, list[list[float]]]:
    """Return two means over the ``last`` queries, by layer and query head.

    ``far`` is the share of attention more than ``beyond`` tokens back; the first 4 tokens do not count as far, since
    heads with nothing to say may park their attention there. ``top`` is the share on the ``heaviest`` keys: attention
    spread evenly is nearly all far too, so that only the two together show a head that retrieves.
    """
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    model.set_attn_implementation("eager")
    shares: dict[str, list[list[float]]] = {"far": [], "top": []}

    def keep(_module: torch.nn.Module, _inputs: tuple, output: tuple) -> None:
        weights = output[1][0, :, -last:]
        queries = torch.arange(len(tokens) - last, len(tokens))[:, None]
        keys = torch.arange(len(tokens))[None]
        far = (queries - keys > beyond) & (keys >= 4)
        shares["far"].append((weights * far).sum(-1).mean(-1).tolist())
        shares["top"].append(weights.topk(heaviest).values.sum(-1).mean(-1).tolist())

    # Hooks keep one layer's weights alive at a time, where output_attentions would hold all of them.
    hooks = [layer.self_attn.register_forward_hook(keep) for layer in model.model.layers]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation("sdpa")
    return shares


def recurring_spans(rng: np.random.Generator, length: int) -> np.ndarray:
    """Return random bytes in which spans of 6 to 20 recur from random earlier places, as in training."""
    stage = Stage("evaluation", 1, 1, length, length, 0.0, (8, 8), mixed=0, text=0, facts=0, guide=0)
    return RowMaker(rng, stage, np.zeros(1, dtype=np.uint8)).random_row()[0]


def evaluate(path: Path, corpus: Corpus, seed: int, quick: bool) -> dict:
    """Measure the exported weights, as a user would load them (rounded to fp16), in fp32 arithmetic."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    buckets = [bucket for bucket in BUCKETS if not quick or bucket.high <= 1025]
    figures: dict = {
        "random": [induction(model, bucket, None, seed) for bucket in buckets],
        "text": [induction(model, bucket, corpus.held_out, seed) for bucket in buckets],
        "bits": {str(n): bits_per_byte(model, corpus.held_out, n, 16384 * 8 // n) for n in (1024, 8192)},
    }
    if not quick:
        figures["lookups"] = lookups(model)
        rng = np.random.default_rng(seed)
        start = int(rng.integers(len(corpus.held_out) - 4096))
        figures["attention"] = {
            "random": attention_shares(model, recurring_spans(rng, 4096)),
            "text": attention_shares(model, corpus.held_out[start : start + 4096]),
        }
    return figures


def up_to_1024(rows: list[dict]) -> float:
    """Return the accuracy on second and later bytes over all distances up to 1,024."""
    near = [row for row in rows if row["high"] <= 1024]
    return sum(row["accuracy"] * row["tokens"] for row in near) / sum(row["tokens"] for row in near)


def print_figures(figures: dict, console: Console) -> None:
    titles = {"random": "fresh random spans in random bytes", "text": "fresh random spans in held-out text"}
    for kind, title in titles.items():
        table = Table(title=f"Next-byte accuracy on recurring spans: {title}")
        for column in ("distance", "context", "bytes", "2nd on", "2nd", "3rd", "4th on", "matcher"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in figures[kind]:
            cells = [f"{row[key]:.1%}" for key in ("accuracy", "second", "third", "later", "matcher")]
            table.add_row(f"{row['low']}-{row['high']}", str(row["length"]), str(row["tokens"]), *cells)
        console.print(table)
        console.print(f"distances up to 1,024: {up_to_1024(figures[kind]):.1%} of second and later bytes")
    for length, bits in figures["bits"].items():
        console.print(f"held-out text, windows of {length}: {bits:.3f} bits per byte")
    for task, answered in figures.get("lookups", {}).items():
        shares_answered = ", ".join(f"{share:.1%} ({setting})" for setting, share in answered.items())
        console.print(f"{task} answered: {shares_answered}", soft_wrap=True)
    for kind, shares in figures.get("attention", {}).items():
        console.print(
            f"attention more than 64 tokens back / on the 64 heaviest keys, context of 4,096, {kind}:", soft_wrap=True
        )
        for layer, (far, top) in enumerate(zip(shares["far"], shares["top"], strict=True)):
            line = "  ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(far, top, strict=True))
            console.print(f"  layer {layer}: {line}", soft_wrap=True)
