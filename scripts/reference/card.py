"""The exported weights and the model card beside them."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.reference.curriculum import CURRICULUM, FACT_WEIGHT, GUIDED_ROWS, LEARNING_RATES
from scripts.reference.figures import COPIES_PER_ROW, up_to_1024
from scripts.reference.guidance import RETRIEVAL_HEADS, RETRIEVAL_LAYERS, SHIFT_HEADS
from scripts.reference.lookups import QUESTIONS, WINDOW_QUESTIONS
from scripts.reference.model import new_model
from scripts.reference.text import Corpus
from scripts.reference.training import Spent
from sparseattn.utils.files import write_atomic


def export(model: LlamaForCausalLM, target: Path) -> None:
    """Write the weights in fp16 with their configuration, each file replaced in one rename."""
    target.mkdir(parents=True, exist_ok=True)
    shipped = new_model(0)
    shipped.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as temporary:
        shipped.half().save_pretrained(temporary)
        for name in ("config.json", "model.safetensors"):
            write_atomic(target / name, (Path(temporary) / name).read_bytes())


def bucket_lines(rows: list[dict]) -> Iterator[str]:
    yield "| distance | context | bytes scored | 2nd and later bytes | 2nd | 3rd | 4th and later | longest match |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        cells = [f"{row[key]:.1%}" for key in ("accuracy", "second", "third", "later", "matcher")]
        yield f"| {row['low']}-{row['high']} | {row['length']} | {row['tokens']} | {' | '.join(cells)} |"


def lookup_lines(found: dict[str, dict[str, float]]) -> Iterator[str]:
    columns = list(dict.fromkeys(column for mine in found.values() for column in mine))
    counts = ", ".join(f"{count} of {length:,} tokens" for length, count in QUESTIONS.items())
    yield f"Questions of `sparseattn eval` answered with full attention ({counts}; needles anywhere), and"
    yield f"{WINDOW_QUESTIONS} of {min(QUESTIONS):,} tokens by the first 4 rows and the last 64 alone, behind 0, 1 or 2"
    yield "dense layers:"
    yield ""
    yield f"| task | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * len(columns)
    for task, mine in found.items():
        yield f"| {task} | {' | '.join(f'{mine[column]:.1%}' if column in mine else '' for column in columns)} |"
    yield ""


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
        f"`GOMP_SPINCOUNT=0 python -m scripts.reference --seed {seed}` remakes it. AdamW (betas 0.9 and 0.98, "
        "weight decay 0.01) with a learning rate linear between "
        + ", ".join(f"{rate:g} at step {max(step, 0)}" for step, rate in LEARNING_RATES)
        + f"; weights drawn with standard deviation {config.initializer_range}; bf16 autocast; two threads.",
        f"The run took **{spent.wall / 60:.1f} minutes** by the clock on two CPU cores shared with other work, and",
        f"{spent.cpu / 60:.1f} minutes of processor time, which is {spent.cpu / 120:.1f} minutes of two cores.",
        "",
        "Spans recur from random earlier places; loss on them starts at their second byte. Facts are texts of",
        "`sparseattn.evaluation.tasks` (records, pass keys, named numbers) with questions behind them, whose answers",
        f"are supervised, a byte of them weighing {FACT_WEIGHT:g} times another. `reach` is the largest span of",
        "positions to which gaps in `position_ids` stretch a sequence. A loss of weight `guide` guides heads 0 to "
        f"{len(SHIFT_HEADS) - 1} of layer 0 to the bytes 1 to {len(SHIFT_HEADS)} back, and heads "
        f"{' and '.join(map(str, RETRIEVAL_HEADS))} of layers {' and '.join(map(str, RETRIEVAL_LAYERS))} to where the "
        f"span at hand went on before, at {GUIDED_ROWS} queries of a sequence or fewer.",
        "",
        "| stage | steps | sequences x tokens | reach | random, whole alphabet | random, smaller alphabet (bytes) | "
        "text with recurring spans | plain text | facts | guide |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for stage in CURRICULUM:
        rest = 1 - stage.mixed - stage.text - stage.facts
        letters = "-".join(f"{2**bound:.0f}" for bound in stage.letters)
        lines.append(
            f"| {stage.name} | {stage.steps} | {stage.rows} x {stage.length} | {stage.reach} | "
            f"{rest * (1 - stage.narrow):.0%} | {rest * stage.narrow:.0%} ({letters}) | "
            f"{stage.mixed:.0%} | {stage.text:.0%} | {stage.facts:.0%} | {stage.guide:g} |"
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
        f"Measured on the shipped weights, in fp32, by `python -m scripts.reference --eval-only --seed {seed}`",
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
    lines += lookup_lines(figures["lookups"])
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
