"""Tokens a second of lossless generation, by drafts of several methods, against dense decoding, by turns.

``python -m benchmarks.lossless --model smollm2 --tokens 2048`` from the repository root writes
``benchmarks/results/lossless-MODEL-TOKENS-TEXT.json``.

All ways go on greedily from one prompt, so that all of them generate the same tokens. Dense are transformers' `sdpa`
and `static` (`decoding.py`) and this package's own plain steps over rows where they lie (`draft=0`), which a draft has
to beat too. A round gives each way a block of tokens. What was drafted, accepted, and how long drafting and checking
took is of those blocks: seconds are medians over them, and the tokens of a round a mean, from the share of drafts that
was accepted.

The prompt of `--random` is taken in by blocks of `--chunk` tokens which do not see each other, at their positions: a
prefill of 131,072 tokens takes an hour on two cores, and what a step takes does not depend on the rows' numbers.
Acceptance does: `--damp` makes attention's part of a random model's residual stream as small as one likes, so that
drafts are accepted as seldom or as often as with a trained model. That of a random model says nothing by itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from benchmarks import records
from benchmarks.decoding import Way, dense_ways
from benchmarks.models import prompt, random_model, with_attention
from benchmarks.records import RESULTS
from sparseattn.cli.options import MODEL_HELP
from sparseattn.cli.values import integers
from sparseattn.cost_model.environment import idle_threads, machine, versions
from sparseattn.models.drafts.blocks import advance, loop_behind
from sparseattn.models.drafts.length import DraftLength, FixedLength
from sparseattn.models.drafts.loop import DraftLoop
from sparseattn.models.load import encode, load_model
from sparseattn.models.lossless import auto_length
from sparseattn.models.prefill import Prefill
from sparseattn.models.sparse_cache import restore
from sparseattn.models.transformers_classes import DynamicCache
from sparseattn.traces.texts import read_named
from sparseattn.utils.devices import features, usable_device

SELECTED = ("quest", "lowbit", "querypq", "window")
IN_PLACE = "in place"
WARM = 2  # tokens of each way that do not count


class BlockPrefill(Prefill):
    """A `Prefill` whose blocks of `chunk` tokens do not see each other."""

    def __init__(self, model: Any, plain: Any, ids: Tensor, chunk: int) -> None:
        super().__init__(model, ids[:, :1], queries=False)
        for start in range(1, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            rows = DynamicCache(config=plain.config)
            positions = torch.arange(start, start + part.shape[1])[None]
            with torch.no_grad():
                out = plain(input_ids=part, position_ids=positions, cache=rows, use_cache=True, logits_to_keep=1)
            for mine, made in zip(self._cache.layers, rows.layers, strict=True):
                mine.parts[0].rows.append(made.keys, made.values)
                mine.columns += part.shape[1]
        self.tokens, self.logits = ids.shape[1], out.logits[:, -1]


@dataclass
class Turn:
    """A way to generate: it takes blocks of tokens by turns.

    Attributes:
        selector: of the drafts; "" for dense ways.
        draft: tokens drafted; None for transformers' ways.
        rounds: seconds a token, of each round.
    """

    name: str
    selector: str = ""
    draft: int | None = None
    rounds: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)

    @property
    def seconds_a_token(self) -> float:
        """Of transformers' ways the median. With drafts a block is few rounds, of which some give one token and some
        all: the median over blocks says what the commoner kind gives. So it is a round's median seconds over its mean
        tokens. What keeps and drops rows between rounds is not in it, about 1 % of a token, nor in plain steps."""
        if self.draft is None:
            return statistics.median(self.rounds)
        verify = statistics.median(self.verify_seconds)
        if not self.draft:
            return verify
        return (self.draft * statistics.median(self.draft_seconds) + verify) / (
            1 + self.draft * self.accepted / self.drafted
        )


class Bench:
    """All ways behind one prompt.

    Args:
        model: prepared for sparse attention while it runs.
        prefill: of the prompt.
        ids: `[1,n]`, the prompt.
        options: of the command.
    """

    def __init__(self, model: Any, prefill: Prefill, ids: Tensor, options: argparse.Namespace) -> None:
        self.prefill, self.ids, self.options = prefill, ids, options
        self.settings = {"sink": options.sink, "window": options.window, "seal": options.seal}
        self.room = ids.shape[1] + 4096
        models = {name: with_attention(options.plain, name) for name in ("sdpa", "eager")}
        self.dense = [way for way in dense_ways(prefill, models, self.room) if way.name in options.dense]
        self.next = {way.name: int(prefill.logits.argmax()) for way in self.dense}
        self.loops = {spec: self._loop(spec, FixedLength(0)) for spec in options.selector}
        self.turns = [Turn(way.name) for way in self.dense] + [Turn(IN_PLACE, options.selector[0], 0)]
        for spec in options.selector:
            self.turns += [Turn(f"{spec}, {count}", spec, count) for count in options.draft]

    def _loop(self, spec: str, length: DraftLength) -> DraftLoop:
        cache = self.prefill.cache(spec, self.options.budget, capacity=self.room, **self.settings)
        loop = loop_behind(self.prefill, cache, self.ids, length)
        loop.choose_once = self.options.choose_once
        return loop

    def warm(self) -> None:
        """Run what compiles code and builds indexes."""
        for way in self.dense:
            self._dense(way, WARM)
        for spec, loop in self.loops.items():
            counts = (0, *self.options.draft) if spec == self.options.selector[0] else self.options.draft
            for count in counts:
                loop.length.drafts = count  # type: ignore[attr-defined]
                advance(loop, 1)

    def run(self) -> None:
        """Let all ways take turns."""
        ways: dict[str, Way] = {way.name: way for way in self.dense}
        for number in range(self.options.rounds):
            first = number % len(self.turns)
            for turn in (*self.turns[first:], *self.turns[:first]):
                if turn.name in ways:
                    turn.rounds.append(self._dense(ways[turn.name], self.options.dense_steps))
                else:
                    self._draft(turn)

    def _dense(self, way: Way, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self.next[way.name] = way.step(torch.tensor([[self.next[way.name]]]))[1]
        return (time.perf_counter() - started) / steps

    def _draft(self, turn: Turn) -> None:
        loop = self.loops[turn.selector]
        loop.length.drafts = turn.draft  # type: ignore[attr-defined]
        block = advance(loop, self.options.block)
        stats = block.stats
        turn.rounds.append(block.seconds / block.tokens)
        turn.drafted += stats.drafted
        turn.accepted += stats.accepted
        checks = sum(stats.rounds.values())
        turn.verify_seconds.append((stats.verify_seconds + stats.dense_seconds) / checks)
        if stats.draft_steps:
            turn.draft_seconds.append(stats.draft_seconds / stats.draft_steps)

    def auto(self, spec: str) -> dict[str, Any]:
        """What `draft="auto"` chooses and gains: blocks of it beside blocks of plain steps, from the first token on."""
        loop, plain = self._loop(spec, FixedLength(0)), self.loops[self.options.selector[0]]
        loop.length = auto_length(loop.cache, 1)
        plain.length.drafts = 0  # type: ignore[attr-defined]
        pairs, chosen, drafted, accepted = [], dict[int, int](), 0, 0
        for _ in range(self.options.auto // self.options.auto_block):
            mine, theirs = (advance(which, self.options.auto_block) for which in (loop, plain))
            pairs.append((mine, theirs))
            for drafts, rounds in mine.stats.rounds.items():
                chosen[drafts] = chosen.get(drafts, 0) + rounds
            drafted, accepted = drafted + mine.stats.drafted, accepted + mine.stats.accepted
        mine_token, plain_token = (
            sum(pair[i].seconds for pair in pairs) / sum(pair[i].tokens for pair in pairs) for i in range(2)
        )
        return {
            "selector": spec,
            "tokens": sum(pair[0].tokens for pair in pairs),
            "rounds": {str(drafts): rounds for drafts, rounds in sorted(chosen.items())},
            "drafted": drafted,
            "accepted": accepted,
            "seconds_a_token": round(mine_token, 6),
            "in_place_seconds_a_token": round(plain_token, 6),
            "to_in_place": round(plain_token / mine_token, 3),
            "reason": loop.length.reason,
        }

    def figures(self) -> list[dict[str, Any]]:
        """What is recorded of each way."""
        theirs = min(turn.seconds_a_token for turn in self.turns if turn.draft is None)
        plain = next(turn.seconds_a_token for turn in self.turns if turn.name == IN_PLACE)
        rows = []
        for turn in self.turns:
            own = turn.seconds_a_token
            rows.append(
                {
                    "way": turn.name,
                    "selector": turn.selector if turn.draft else "",
                    "draft": turn.draft,
                    "seconds_a_token": round(own, 6),
                    "tokens_a_second": round(1 / own, 3),
                    "to_transformers": round(theirs / own, 3),
                    "to_in_place": round(plain / own, 3),
                    "acceptance": round(turn.accepted / turn.drafted, 4) if turn.drafted else None,
                    "draft_seconds": round(statistics.median(turn.draft_seconds), 6) if turn.draft_seconds else None,
                    "verify_seconds": round(statistics.median(turn.verify_seconds), 6) if turn.verify_seconds else None,
                }
            )
        return rows


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """A record in words."""
    table = Table(
        title=f"{record['model']}, {record['tokens']} tokens, budget {record['budget']}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("way")
    for title in ("ms a token", "tokens/s", "to transformers", "to in place", "accepted", "ms a draft", "ms a check"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in record["ways"]:
        table.add_row(
            row["way"],
            f"{row['seconds_a_token'] * 1e3:.2f}",
            f"{row['tokens_a_second']:.1f}",
            f"{row['to_transformers']:.2f}",
            f"{row['to_in_place']:.2f}",
            "" if row["acceptance"] is None else f"{row['acceptance']:.0%}",
            "" if row["draft_seconds"] is None else f"{row['draft_seconds'] * 1e3:.2f}",
            "" if row["verify_seconds"] is None else f"{row['verify_seconds'] * 1e3:.2f}",
        )
    yield table


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.lossless", description="Tokens a second without loss.")
    out.add_argument("--model", default="smollm2", help=MODEL_HELP + "; random: a Llama of 4 layers, random weights")
    out.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    out.add_argument("--text", default="alice", help="the prompt's, by name; of a random model: random tokens")
    out.add_argument("--damp", type=float, default=1.0, help="factor of a random model's output projections")
    out.add_argument("--selector", action="append", help=f"of drafts; repeat for more; default {' '.join(SELECTED)}")
    out.add_argument("--budget", type=int, default=256, help="rows of a draft step")
    out.add_argument("--draft", default="2,4,8", help="tokens to draft; several with commas")
    out.add_argument("--choose-once", action="store_true", help="drafts of a round read what its first one chose")
    out.add_argument("--dense", default="sdpa,static", help="ways of transformers, with commas")
    out.add_argument("--rounds", type=int, default=5, help="turns of each way")
    out.add_argument("--block", type=int, default=8, help="tokens of a turn, at least")
    out.add_argument("--dense-steps", type=int, default=4, help="steps of a turn of transformers' ways")
    out.add_argument("--auto", type=int, default=96, help='tokens by draft="auto" of the first selector')
    out.add_argument("--auto-block", type=int, default=16, help="tokens of its turns")
    out.add_argument("--sink", type=int, default=4)
    out.add_argument("--window", type=int, default=64)
    out.add_argument("--seal", type=int, default=1024, help="rows that wait before they are sealed")
    out.add_argument("--chunk", type=int, default=2048, help="tokens a forward pass of the prefill")
    out.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    out.add_argument("--threads", type=int, default=torch.get_num_threads())
    out.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    out.add_argument("--json", action="store_true", help="print the record, on one line")
    return out


def settle(options: argparse.Namespace) -> None:
    """Turns texts into values; ValueError for what cannot be."""
    options.device = str(usable_device("cpu"))
    options.draft = integers(options.draft, "--draft") or []
    options.dense = options.dense.split(",")
    options.selector = list(dict.fromkeys(options.selector or SELECTED))
    for name in ("tokens", "budget", "rounds", "block", "dense_steps", "chunk", "threads", "auto_block"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is 1 or more, got {getattr(options, name)}")
    if unknown := set(options.dense) - {"sdpa", "eager", "static"}:
        raise ValueError(f"--dense is of sdpa, eager and static, got {', '.join(sorted(unknown))}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The record of one model and length."""
    dtype, is_random = getattr(torch, options.dtype), options.model == "random"
    if is_random:
        model, tokenizer = random_model("small", None, torch.float32, "cpu").to(dtype), None
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(options.damp)
    else:
        model, tokenizer = load_model(options.model, dtype, options.device)
    model.set_attn_implementation("sdpa")
    options.plain = with_attention(model, "sdpa")
    if is_random:
        ids = prompt(None, 32_000, options.tokens)
    else:
        ids = encode(tokenizer, read_named(options.text).encode())[:, : options.tokens]
        if ids.shape[1] < options.tokens:
            raise ValueError(f"--text {options.text} has {ids.shape[1]} tokens, and --tokens is {options.tokens}")
    begun = time.perf_counter()
    if is_random:
        prefill: Prefill = BlockPrefill(model, options.plain, ids, options.chunk)
    else:
        prefill = Prefill(model, ids, chunk=options.chunk)
    prefilled = time.perf_counter() - begun
    load_before = os.getloadavg()
    try:
        bench = Bench(model, prefill, ids, options)
        bench.warm()
        bench.run()
        ways = bench.figures()
        auto = [bench.auto(options.selector[0])] if options.auto else []
    finally:
        restore(model)
    config = model.config.get_text_config(decoder=True)
    shape = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    return {
        "question": "tokens a second of greedy generation without loss",
        "measure": "a round's median seconds over its mean tokens",
        "model": options.model,
        "shape": {name: getattr(config, name, None) for name in shape}
        | {"parameters": sum(tensor.numel() for tensor in model.parameters())},
        "prompt": f"blocks of {options.chunk} tokens that do not see each other" if is_random else options.text,
        "damp": options.damp if is_random else None,
        "tokens": options.tokens,
        "dtype": options.dtype,
        "device": options.device,
        "threads": options.threads,
        "budget": options.budget,
        "choose_once": options.choose_once,
        **bench.settings,
        "rounds": options.rounds,
        "block": options.block,
        "ways": ways,
        "auto": auto,
        "prefill_seconds": round(prefilled, 1),
        "seconds": round(time.perf_counter() - begun, 1),
        "load": {"before": load_before, "after": os.getloadavg()},
        "versions": versions(),
        "machine": machine(),
        "features": features(),
        "idle_threads": idle_threads(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    try:
        settle(options)
    except (ValueError, ImportError, RuntimeError) as error:
        command.error(str(error))
    torch.set_num_threads(options.threads)
    try:
        record = measure(options)
    except ValueError as error:
        command.error(str(error))
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"lossless-{options.model}-{options.tokens}-{options.text}.json"
    records.save(record, path)
    records.show(record, tables, f"record: {path}", options.json)


if __name__ == "__main__":
    main()
