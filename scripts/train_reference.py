"""Train, export and evaluate the built-in reference model of sparseattn.

The reference model is a small byte-level ``LlamaForCausalLM`` (a token is a byte, so it needs no tokenizer). It is
trained to retrieve: its attention must contain induction heads that find the earlier occurrence of the bytes at hand
at distances of thousands of tokens, because benchmarks of sparse attention mean nothing on a model that never looks
far back.

How it is taught to retrieve:

* Sequences hold spans copied from *random* earlier places. With fixed offsets the model learns the offset, which is a
  positional shortcut, and never compares contents. Loss on a copy starts at its second token, since nothing predicts
  the first.
* Alphabets vary from 8 to 256 bytes between sequences. In a small alphabet one byte occurs many times, so that the
  model must match on several bytes; with 256 bytes and short sequences matching on one would do, and would then fail
  in a long context.
* A few heads' attention is guided by a loss of its own in all stages but the last: three heads of layer 0 to the bytes
  1, 2 and 3 back, four heads of layers 1 and 2 to where the span at hand went on before. Both halves of an induction
  circuit are useless without the other, which is why it takes long to appear by itself; guided, it is there after 250
  steps, and matches several bytes at once, which it had not learned to do by step 2,100 without.
* Distances grow through gaps in ``position_ids`` between spans (never inside one): a sequence of 128 tokens then spans
  thousands of positions at the cost of 128. The last stages use longer sequences, since gaps stretch distances but add
  no keys that compete.
* Text (source code and documentation found on this machine) is mixed in, plain and with recurring spans.

Run ``GOMP_SPINCOUNT=0 python scripts/train_reference.py`` to train (it resumes from ``--work-dir`` when that holds a
state), and ``python scripts/train_reference.py --eval-only`` to print the figures of the exported weights again. The
variable keeps OpenMP's threads from spinning at barriers: where another process wants the cores too, steps took seven
times as long without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

REPOSITORY = Path(__file__).resolve().parent.parent
EXPORT_DIR = REPOSITORY / "sparseattn" / "data" / "reference"
WORK_DIR = REPOSITORY / "build" / "reference"

VOCABULARY = 256
MAX_POSITIONS = 16384
# Heads of layer 0 guided to the byte 1, 2 and 3 back; heads of later layers guided to where a span at hand went on
# before, one to a key-value head.
SHIFT_HEADS = {0: 1, 1: 2, 2: 3}
RETRIEVAL_LAYERS = (1, 2)
RETRIEVAL_HEADS = (0, 4)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum: ``steps`` batches of ``rows`` sequences of ``length`` tokens."""

    name: str
    steps: int
    rows: int
    length: int
    reach: int  # Largest span of positions that gaps may stretch a sequence to.
    narrow: float  # Share of random sequences whose alphabet is smaller than 256.
    letters: tuple[float, float]  # Range of the binary logarithm of a smaller alphabet's size, drawn uniformly.
    mixed: float  # Share of sequences of text with recurring spans.
    text: float  # Share of sequences of plain text.
    guide: float  # Weight of the loss that guides a few heads' attention (0: none).


CURRICULUM = (
    Stage("form", 300, 64, 64, reach=64, narrow=0.3, letters=(3, 7), mixed=0.0, text=0.2, guide=0.3),
    Stage("stretch", 500, 32, 128, reach=16384, narrow=0.6, letters=(3, 7), mixed=0.2, text=0.2, guide=0.3),
    Stage("crowd", 250, 8, 512, reach=16384, narrow=0.5, letters=(3, 8), mixed=0.25, text=0.2, guide=0.3),
    Stage("settle", 120, 2, 2048, reach=16384, narrow=0.4, letters=(3, 8), mixed=0.25, text=0.2, guide=0.0),
)
TOTAL_STEPS = sum(stage.steps for stage in CURRICULUM)
# Learning rates at some steps, linear between them.
LEARNING_RATES = ((-1, 0.0), (99, 2.5e-3), (750, 2.5e-3), (TOTAL_STEPS, 1e-4))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out text as bytes, with a digest of the list of files (paths and contents)."""

    train: np.ndarray
    held_out: np.ndarray
    files: int
    held_out_files: int
    digest: str


@dataclasses.dataclass
class Batch:
    """One batch; ``offset`` is a token's place in its copy (0 outside copies), ``supervised`` where loss counts."""

    tokens: torch.Tensor
    positions: torch.Tensor
    offset: torch.Tensor
    supervised: torch.Tensor


def text_files() -> Iterator[Path]:
    """Yield the files text is taken from, in a sorted order: standard library, Debian documentation, Vim's manual."""
    library = Path(sysconfig.get_paths()["stdlib"])
    # The library's own tests are mostly tables of cases, and site-packages vary with the environment.
    skipped = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}
    yield from sorted(p for p in library.rglob("*.py") if not skipped & set(p.relative_to(library).parts))
    for root, endings in ((Path("/usr/share/doc"), {".txt", ".md", ".rst"}), (Path("/usr/share/vim"), {".txt"})):
        yield from sorted(p for p in root.rglob("*") if p.suffix in endings and p.is_file() and not p.is_symlink())


def load_corpus(limit: int = 65536) -> Corpus:
    """Read the text, at most ``limit`` bytes a file so that no file dominates; about 1 file in 20 is held out.

    A file is held out by the digest of its contents, and contents met before are left out, so that no text is in both
    parts and the split is the same whichever files a machine has besides.
    """
    seen: set[bytes] = set()
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    listing = hashlib.sha256()
    for path in text_files():
        data = path.read_bytes()[:limit]
        digest = hashlib.sha256(data).digest()
        if len(data) < 512 or digest in seen:
            continue
        seen.add(digest)
        listing.update(f"{path}\0".encode() + digest)
        parts[digest[0] % 20 == 0].append(data)
    if not parts[False] or not parts[True]:
        raise SystemExit("no text found: neither Python's standard library, /usr/share/doc nor /usr/share/vim is there")
    return Corpus(
        train=np.frombuffer(b"\n".join(parts[False]), dtype=np.uint8),
        held_out=np.frombuffer(b"\n".join(parts[True]), dtype=np.uint8),
        files=len(parts[False]),
        held_out_files=len(parts[True]),
        digest=listing.hexdigest(),
    )


class RowMaker:
    """Makes the sequences of one step from a generator seeded by (seed, step)."""

    def __init__(self, rng: np.random.Generator, stage: Stage, text: np.ndarray) -> None:
        self.rng = rng
        self.stage = stage
        self.text = text

    def window(self, length: int) -> np.ndarray:
        start = int(self.rng.integers(len(self.text) - length))
        return self.text[start : start + length]

    def alphabet(self, narrow: float) -> np.ndarray:
        size = VOCABULARY
        if self.rng.random() < narrow:
            size = int(2 ** self.rng.uniform(*self.stage.letters))
        return self.rng.permutation(VOCABULARY)[:size].astype(np.uint8)

    def random_row(self) -> tuple[np.ndarray, ...]:
        """Return random bytes in which spans of 6 to 20 recur; only the recurrences are supervised."""
        alphabet = self.alphabet(self.stage.narrow)
        return self._spans(alphabet, text=False)

    def mixed_row(self) -> tuple[np.ndarray, ...]:
        """Return pieces of text and random spans, both of which recur."""
        return self._spans(self.alphabet(0.7), text=True)

    def text_row(self) -> tuple[np.ndarray, ...]:
        length = self.stage.length
        supervised: np.ndarray = np.ones(length, dtype=bool)
        supervised[0] = False
        return self.window(length), np.arange(length), np.zeros(length, dtype=np.int64), supervised

    def _fresh(self, alphabet: np.ndarray, text: bool) -> tuple[np.ndarray, bool]:
        """Return a new span and whether it is text, which is supervised (nothing predicts random bytes)."""
        if text and self.rng.random() < 0.7:
            return self.window(int(self.rng.integers(16, 97))), True
        return alphabet[self.rng.integers(len(alphabet), size=self.rng.integers(6, 21))], False

    def _spans(self, alphabet: np.ndarray, text: bool) -> tuple[np.ndarray, ...]:
        rng, length = self.rng, self.stage.length
        tokens: np.ndarray = np.zeros(length, dtype=np.uint8)
        offset: np.ndarray = np.zeros(length, dtype=np.int64)
        supervised: np.ndarray = np.zeros(length, dtype=bool)
        run_end: np.ndarray = np.zeros(
            length, dtype=np.int64
        )  # Where the stretch without gaps that a token lies in ends.
        joints: list[int] = []
        gap_share = rng.uniform(0.2, 1.0) if self.stage.reach > length else 0.0
        longest = 40 if text else 20
        at = run_start = 0
        while at < length:
            if at and rng.random() < gap_share:
                run_end[run_start:at] = at
                run_start = at
                joints.append(at)
            else:
                run_end[run_start:at] = at
            size = 0
            if at >= 8 and rng.random() < 0.6:
                # A source must not run over a gap: inside a copy positions are consecutive, and in it must be too.
                start = int(rng.integers(at - 5))
                size = min(int(rng.integers(6, longest + 1)), int(run_end[start]) - start, length - at)
            if size >= 3:
                tokens[at : at + size] = tokens[start : start + size]
                offset[at : at + size] = np.arange(size)
                supervised[at + 1 : at + size] = True
            else:
                span, is_text = self._fresh(alphabet, text)
                size = min(len(span), length - at)
                tokens[at : at + size] = span[:size]
                supervised[at + 1 : at + size] = is_text
            at += size
        return tokens, np.arange(length) + self._gaps(joints), offset, supervised

    def _gaps(self, joints: list[int]) -> np.ndarray:
        """Return what to add to positions: the sequence's surplus of positions, shared at random among its joints."""
        length = self.stage.length
        steps: np.ndarray = np.zeros(length, dtype=np.int64)
        if joints:
            # Log-uniform, so that short distances keep being trained when long ones have joined.
            surplus = length * (self.stage.reach / length) ** self.rng.random() - length
            weights = self.rng.exponential(size=len(joints)) ** 2
            steps[joints] = (surplus * weights / weights.sum()).astype(np.int64)
        return np.cumsum(steps)


def make_batch(seed: int, step: int, stage: Stage, text: np.ndarray) -> Batch:
    """Return the batch of a step: it depends on the seed and the step only, so a resumed run sees the same data."""
    maker = RowMaker(np.random.default_rng((seed, step)), stage, text)
    rows = []
    for _ in range(stage.rows):
        draw = maker.rng.random()
        if draw < stage.text:
            rows.append(maker.text_row())
        elif draw < stage.text + stage.mixed:
            rows.append(maker.mixed_row())
        else:
            rows.append(maker.random_row())
    tokens, positions, offset, supervised = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    return Batch(tokens.long(), positions, offset, supervised)


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        # At 1e7, 28 of a head's 64 dimensions turn less than a radian over 8k positions (20 at 500,000): that is the
        # room to match contents whatever the distance.
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        initializer_range=0.05,
        # A byte has no spare values for special tokens.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int) -> float:
    steps, rates = zip(*LEARNING_RATES, strict=True)
    return float(np.interp(step, steps, rates))


def stage_at(step: int) -> Stage:
    for stage in CURRICULUM:
        if step < stage.steps:
            return stage
        step -= stage.steps
    raise ValueError("step is past the end of the curriculum")


def guidance(weights: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return minus the log of the attention that guided heads give to where they should look, averaged.

    ``weights`` are the attention weights of layers 0 to the last of ``RETRIEVAL_LAYERS``. Without guidance a head that
    matches one byte formed after 900 steps, and one that matches several had not after 2,100.
    """
    tokens, positions = batch.tokens, batch.positions
    losses = []
    for head, shift in SHIFT_HEADS.items():
        there = weights[0][:, head].diagonal(-shift, 1, 2)
        adjacent = positions[:, shift:] - positions[:, :-shift] == shift
        losses.append(-there[adjacent].float().clamp_min(1e-9).log().mean())
    # same[b, t, k]: the bytes t and k are equal; match: so are the last bytes up to t and up to k - 1, as many as the
    # copy has so far, 4 at most. The next byte must agree as well, so that no wrong continuation is rewarded.
    same = tokens[:, :, None] == tokens[:, None, :]
    going_on = torch.zeros_like(tokens, dtype=torch.bool)
    going_on[:, :-1] = batch.offset[:, 1:] > 0
    match = going_on[:, :, None] & (positions[:, :, None] > positions[:, None, :])
    match[:, :-1] &= same[:, 1:]
    for back in range(4):
        agree = torch.zeros_like(same)
        agree[:, back:, back + 1 :] = same[:, : same.shape[1] - back, : -back - 1]
        match &= agree | (batch.offset < back)[:, :, None]
    for layer in RETRIEVAL_LAYERS:
        for head in RETRIEVAL_HEADS:
            there = (weights[layer][:, head].float() * match).sum(-1)[match.any(-1)]
            losses.append(-there.clamp_min(1e-9).log().mean())
    return torch.stack([loss for loss in losses if loss.isfinite()]).mean()


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch, guide: float
) -> tuple[float, float]:
    """Take one step; return the loss in bits per supervised byte and the accuracy on copies' second and later bytes."""
    weights: list[torch.Tensor] = []
    layers = model.model.layers[: max(RETRIEVAL_LAYERS) + 1] if guide else ()
    hooks = [layer.self_attn.register_forward_hook(lambda *call: weights.append(call[2][1])) for layer in layers]
    with torch.autocast("cpu", torch.bfloat16):
        # Without an attention mask transformers takes a jump in position_ids for the start of another, packed sequence
        # and stops attention there; a mask of ones makes it leave the gaps alone.
        hidden = model.model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=torch.ones_like(batch.tokens),
            use_cache=False,
        ).last_hidden_state
        chosen = batch.supervised[:, 1:]
        logits = model.lm_head(hidden[:, :-1][chosen]).float()
    targets = batch.tokens[:, 1:][chosen]
    loss = torch.nn.functional.cross_entropy(logits, targets)
    for hook in hooks:
        hook.remove()
    (loss + guide * guidance(weights, batch) if guide else loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    in_copy = batch.offset[:, 1:][chosen] > 0
    correct = (logits.argmax(-1) == targets)[in_copy]
    return loss.item() / math.log(2), correct.float().mean().item()


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def fingerprint(seed: int, corpus: Corpus) -> str:
    """Return a digest of all that determines a run, so that a state is never resumed under another recipe."""
    recipe = [
        seed,
        corpus.digest,
        [dataclasses.astuple(stage) for stage in CURRICULUM],
        LEARNING_RATES,
        [list(SHIFT_HEADS.items()), RETRIEVAL_LAYERS, RETRIEVAL_HEADS],
        new_model(seed).config.to_dict(),
    ]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds by the clock and of processor time: they differ where the cores are shared."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Spent:
        return cls(time.monotonic(), time.process_time())

    def since(self, start: Spent, before: Spent) -> Spent:
        return Spent(self.wall - start.wall + before.wall, self.cpu - start.cpu + before.cpu)


def save_state(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, step: int, spent: Spent, recipe: str
) -> None:
    """Write weights and optimizer moments as one safetensors file that replaces the last one in a single rename."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors[f"weight/{name}"] = parameter.detach()
        tensors[f"mean/{name}"] = state["exp_avg"]
        tensors[f"square/{name}"] = state["exp_avg_sq"]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(
        tensors,
        temporary,
        metadata={"step": str(step), "wall": repr(spent.wall), "cpu": repr(spent.cpu), "recipe": recipe},
    )
    sync_and_replace(temporary, path)


def sync_and_replace(temporary: Path, path: Path) -> None:
    # Synced before the rename, or a power cut could leave the new name on an empty file.
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_state(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, recipe: str) -> tuple[int, Spent]:
    """Restore what ``save_state`` wrote; return the steps done and the time they took."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        if metadata["recipe"] != recipe:
            raise SystemExit(f"{path} is from another recipe, seed or corpus; remove it or give another --work-dir")
        step = int(metadata["step"])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(file.get_tensor(f"weight/{name}"))
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": file.get_tensor(f"mean/{name}"),
                    "exp_avg_sq": file.get_tensor(f"square/{name}"),
                }
    return step, Spent(float(metadata["wall"]), float(metadata["cpu"]))


def train(options: argparse.Namespace, corpus: Corpus, console: Console) -> tuple[LlamaForCausalLM, Spent]:
    """Train to the end of the curriculum (or ``--stop-at``); return the model and the time it took."""
    recipe = fingerprint(options.seed, corpus)
    model = new_model(options.seed)
    optimizer = new_optimizer(model)
    state = options.work_dir / "state.safetensors"
    step, before = load_state(state, model, optimizer, recipe) if state.exists() else (0, Spent())
    if step:
        console.print(f"resuming at step {step} after {before.wall:.0f} s")
    last = min(TOTAL_STEPS, options.stop_at or TOTAL_STEPS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = Spent.now()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=last, completed=step)
        losses: list[float] = []
        accuracies: list[float] = []
        while step < last:
            stage = stage_at(step)
            # Only eager attention gives its weights away.
            model.set_attn_implementation("eager" if stage.guide else "sdpa")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            loss, accuracy = train_step(
                model, optimizer, make_batch(options.seed, step, stage, corpus.train), stage.guide
            )
            losses.append(loss)
            accuracies.append(accuracy)
            step += 1
            progress.update(task, completed=step, description=f"{stage.name} {loss:.2f} bits, copies {accuracy:.0%}")
            if step % options.log_every == 0 or step == last:
                spent = Spent.now().since(started, before)
                console.print(
                    f"{spent.wall:6.0f} s, {spent.cpu:6.0f} s of processor  step {step:5d}  {stage.name:8s} "
                    f"{np.mean(losses):6.3f} bits  copies {np.nanmean(accuracies):6.1%}"
                )
                losses.clear()
                accuracies.clear()
            if step % options.save_every == 0 or step == last:
                save_state(state, model, optimizer, step, Spent.now().since(started, before), recipe)
    return model, Spent.now().since(started, before)


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


def predictions(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model(input_ids=ids, use_cache=False).logits[0].argmax(-1).numpy()


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
    stage = Stage("evaluation", 1, 1, length, reach=length, narrow=0.0, letters=(8, 8), mixed=0.0, text=0.0, guide=0.0)
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
    for kind, shares in figures.get("attention", {}).items():
        console.print(
            f"attention more than 64 tokens back / on the 64 heaviest keys, context of 4,096, {kind}:", soft_wrap=True
        )
        for layer, (far, top) in enumerate(zip(shares["far"], shares["top"], strict=True)):
            line = "  ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(far, top, strict=True))
            console.print(f"  layer {layer}: {line}", soft_wrap=True)


def export(model: LlamaForCausalLM, target: Path) -> None:
    """Write the weights in fp16 with their configuration, each file replaced in one rename."""
    target.mkdir(parents=True, exist_ok=True)
    shipped = new_model(0)
    shipped.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        shipped.half().save_pretrained(temporary)
        for name in ("config.json", "model.safetensors"):
            # safetensors writes files that only their owner may read.
            (Path(temporary) / name).chmod(0o644)
            sync_and_replace(Path(temporary) / name, target / name)


def bucket_lines(rows: list[dict]) -> Iterator[str]:
    yield "| distance | context | bytes scored | 2nd and later bytes | 2nd | 3rd | 4th and later | longest match |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        cells = [f"{row[key]:.1%}" for key in ("accuracy", "second", "third", "later", "matcher")]
        yield f"| {row['low']}-{row['high']} | {row['length']} | {row['tokens']} | {' | '.join(cells)} |"


def model_card(path: Path, figures: dict, corpus: Corpus, seed: int, spent: Spent) -> str:
    """Return the model card; every figure in it is measured on the exported weights or read from the run."""
    config = LlamaConfig.from_pretrained(path)
    weights = path / "model.safetensors"
    with safe_open(weights, framework="pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    lines = [
        "# Reference model",
        "",
        "A byte-level `LlamaForCausalLM` with induction (retrieval) heads, trained for sparseattn's own benchmarks and",
        "tests. It is no language model to use for anything else.",
        "",
        "**A byte is its own token id** (vocabulary 256), so there is no tokenizer and there are no special tokens:",
        '`torch.tensor([list("text".encode())])` is an input.',
        "",
        "```python",
        "from transformers import AutoModelForCausalLM",
        'model = AutoModelForCausalLM.from_pretrained("sparseattn/data/reference", dtype="float32")',
        "```",
        "",
        f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} query "
        f"heads on {config.num_key_value_heads} key-value heads of size {config.head_dim}, feed-forward "
        f"{config.intermediate_size}, tied embeddings, RoPE with theta {config.rope_parameters['rope_theta']:,.0f}, "
        f"{config.max_position_embeddings:,} positions; {parameters:,} parameters, stored in fp16 "
        f"({weights.stat().st_size:,} bytes, sha256 `{hashlib.sha256(weights.read_bytes()).hexdigest()}`).",
        "",
        "## Recipe",
        "",
        f"`GOMP_SPINCOUNT=0 python scripts/train_reference.py --seed {seed}` remakes it. AdamW (betas 0.9 and 0.98, "
        "weight decay 0.01) with a learning rate linear between "
        + ", ".join(f"{rate:g} at step {max(step, 0)}" for step, rate in LEARNING_RATES)
        + f"; weights drawn with standard deviation {config.initializer_range}; bf16 autocast; two threads.",
        f"The run took **{spent.wall / 60:.1f} minutes** by the clock on two CPU cores shared with other work, and",
        f"{spent.cpu / 60:.1f} minutes of processor time, which is {spent.cpu / 120:.1f} minutes of two cores.",
        "",
        "Spans recur from random earlier places; loss on them starts at their second byte. `reach` is the largest span",
        "of positions to which gaps in `position_ids` between spans stretch a sequence. Where `guide` is not 0, a loss",
        "of that weight guides heads 0 to 2 of layer 0 to the bytes 1 to 3 back, and heads "
        f"{' and '.join(map(str, RETRIEVAL_HEADS))} of layers {' and '.join(map(str, RETRIEVAL_LAYERS))} to where the "
        "span at hand went on before.",
        "",
        "| stage | steps | sequences x tokens | reach | random, whole alphabet | random, smaller alphabet (bytes) | "
        "text with recurring spans | plain text | guide |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for stage in CURRICULUM:
        rest = 1 - stage.mixed - stage.text
        letters = "-".join(f"{2**bound:.0f}" for bound in stage.letters)
        lines.append(
            f"| {stage.name} | {stage.steps} | {stage.rows} x {stage.length} | {stage.reach} | "
            f"{rest * (1 - stage.narrow):.0%} | {rest * stage.narrow:.0%} ({letters}) | "
            f"{stage.mixed:.0%} | {stage.text:.0%} | {stage.guide:g} |"
        )
    lines += [
        "",
        f"Text: {corpus.files} files for training ({len(corpus.train):,} bytes) and {corpus.held_out_files} held out "
        f"({len(corpus.held_out):,} bytes), from the running Python's standard library, `/usr/share/doc` and "
        f"`/usr/share/vim`; sha256 of the list of paths and contents `{corpus.digest}`. Another machine has other "
        "files and so makes slightly different weights.",
        "",
        "## Figures",
        "",
        f"Measured on the shipped weights, in fp32, by `python scripts/train_reference.py --eval-only --seed {seed}`",
        "(on the machine and text it was trained with). Positions are contiguous and the context is really as long as",
        f"stated. Spans are of 6 to 20 fresh random bytes (all 256 values), {COPIES_PER_ROW} copies to a sequence. The",
        "last column is no model: it predicts what followed the longest earlier match (the latest such), to show what",
        "can be had at all, since the one byte of context there is for a copy's second byte also occurs elsewhere.",
        "",
        f"Spans in uniform random bytes (up to a distance of 1,024: **{up_to_1024(figures['random']):.1%}**):",
        "",
        *bucket_lines(figures["random"]),
        "",
        f"Spans in held-out text (up to a distance of 1,024: **{up_to_1024(figures['text']):.1%}**):",
        "",
        *bucket_lines(figures["text"]),
        "",
    ]
    lines += [f"Held-out text, windows of {n}: {bits:.3f} bits per byte.  " for n, bits in figures["bits"].items()]
    lines += [
        "",
        "Share of attention more than 64 tokens back (the first 4 tokens not counted) / share on the 64 heaviest keys,",
        "by query head, mean of the last 1,024 queries of a context of 4,096. Attention spread evenly would have about",
        "0.98 and 0.02.",
    ]
    for kind, title in (("random", "Recurring random spans"), ("text", "Held-out text")):
        shares = figures["attention"][kind]
        lines += ["", f"{title}:", ""]
        lines.append("| layer | " + " | ".join(str(head) for head in range(len(shares["far"][0]))) + " |")
        lines.append("|---:|" + "---:|" * len(shares["far"][0]))
        for layer, (far, top) in enumerate(zip(shares["far"], shares["top"], strict=True)):
            cells = [f"{a:.2f} / {b:.2f}" for a, b in zip(far, top, strict=True)]
            lines.append(f"| {layer} | " + " | ".join(cells) + " |")
    return "\n".join(lines).rstrip() + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=WORK_DIR, help="where the state to resume from is kept")
    parser.add_argument("--export-dir", type=Path, default=EXPORT_DIR, help="where weights and model card go")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="stop training after this step, and export nothing")
    parser.add_argument("--eval-only", action="store_true", help="print the figures of the exported weights")
    parser.add_argument("--quick", action="store_true", help="with --eval-only: distances up to 1,024 only")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    console = Console()
    # Another number of threads sums in another order, and so gives slightly different weights.
    torch.set_num_threads(options.threads)
    corpus = load_corpus()
    console.print(
        f"text: {corpus.files} + {corpus.held_out_files} held-out files, sha256 {corpus.digest}", soft_wrap=True
    )
    if options.eval_only:
        print_figures(evaluate(options.export_dir, corpus, options.seed, options.quick), console)
        return
    model, spent = train(options, corpus, console)
    if options.stop_at:
        return
    export(model, options.export_dir)
    figures = evaluate(options.export_dir, corpus, options.seed, quick=False)
    print_figures(figures, console)
    card = options.export_dir / "README.md"
    temporary = card.with_suffix(".tmp")
    temporary.write_text(model_card(options.export_dir, figures, corpus, options.seed, spent))
    sync_and_replace(temporary, card)
    console.print(f"exported to {options.export_dir} after {spent.wall:.0f} s of training")


if __name__ == "__main__":
    main()
