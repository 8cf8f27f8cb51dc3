"""The plug-in in vLLM on a GPU, for whoever has one: stock's tokens at full budget, and decoding against stock's.

``python -m benchmarks.vllm_gpu`` from the repository root, in an environment with vLLM for CUDA (the version that the
plug-in accepts there), writes ``benchmarks/results/vllm-gpu.json``. It takes minutes, 24 GB of GPU memory and no
network. ``--rehearse`` runs the same at small sizes in an environment with vLLM for CPUs, to see that it runs.

Each way of decoding has an engine in a process of its own: stock, the plug-in at full budget, and the plug-in at
``--budget`` rows. The seconds of a token are those of an answer less those of an answer of one token, by the number of
tokens between. A way that fails is recorded with its last lines, and the others run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import records
from benchmarks.measure import spread
from benchmarks.vllm import model_folder
from sparseattn.cli.values import integers
from sparseattn.cost_model.environment import machine, versions
from sparseattn.utils import children

EVERY = 1 << 20  # rows
WAYS = ("stock", "full budget", "sparse")
LINES = 40  # of what a way that fails has said
SMALL = {"model": "random", "contexts": "300,600", "batches": "1,2", "tokens": 6, "rounds": 2, "budget": 64}


def settings(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """What vLLM is given as `additional_config`."""
    if way == "stock":
        return {}
    budget = options.budget if way == "sparse" else EVERY
    above = min(options.contexts) // 2  # every context is decoded sparsely
    return {"sparseattn": {"selector": options.selector, "budget": budget, "dense_layers": 0, "above": above}}


def run(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one way gives, in this process: its answers, and the seconds of a token."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    from sparseattn.serving.vllm.counters import stats

    with tempfile.TemporaryDirectory() as folder:
        model, vocabulary = model_folder(options.model, Path(folder))
        llm = LLM(
            model,
            dtype=options.dtype,
            load_format="dummy" if options.model == "random" else "auto",
            skip_tokenizer_init=True,
            max_model_len=max(options.contexts) + options.tokens + 64,
            enforce_eager=options.eager,
            enable_prefix_caching=True,  # a prompt is computed once, so that answers are mostly decoding
            disable_log_stats=True,
            seed=0,
            additional_config=settings(way, options),
            # The index lies beside the cache, and vLLM measures memory without it.
            **({"kv_cache_memory_bytes": 1 << 28} if options.rehearse else {"gpu_memory_utilization": 0.8}),
        )

        def answer(prompts: list[dict[str, Any]], tokens: int) -> tuple[list[list[int]], float]:
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            found = llm.generate(prompts, sampling, use_tqdm=False)
            return [list(one.outputs[0].token_ids) for one in found], time.perf_counter() - start

        measured = []
        for context in options.contexts:
            for batch in options.batches:
                draw = torch.Generator().manual_seed(context + batch)
                ids = torch.randint(0, vocabulary, (batch, context), generator=draw).tolist()
                prompts = [{"prompt_token_ids": one} for one in ids]
                answer(prompts, 2)
                before, seconds, tokens = stats(), [], list[list[int]]()
                for _ in range(options.rounds):
                    (_, one), (tokens, every) = answer(prompts, 1), answer(prompts, options.tokens)
                    seconds.append((every - one) / (options.tokens - 1))
                counted = stats() - before
                measured.append(
                    {
                        "context": context,
                        "batch": batch,
                        "seconds_a_token": spread(seconds),
                        "sparse_steps": counted.sparse_steps,
                        "rows_share": round(counted.share, 5) if counted.sparse_steps else None,
                        "tokens": tokens,
                    }
                )
    return {"measured": measured}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The record: each way in a process of its own, and their answers beside stock's."""
    ways: dict[str, Any] = {}
    given = {name: value for name, value in vars(options).items() if name not in ("results", "json", "way")}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            out = Path(folder, "out.json")
            out.unlink(missing_ok=True)
            command = children.module(
                "benchmarks.vllm_gpu", "--way", way, "--given", json.dumps(given), "--to", str(out)
            )
            around = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
            done = subprocess.run(command, capture_output=True, text=True, env=around)
            if out.exists():
                ways[way] = json.loads(out.read_text())
            else:
                said = (done.stdout + done.stderr).splitlines()[-LINES:]
                ways[way] = {"measured": [], "exit": done.returncode, "said": said}
    stock = {(one["context"], one["batch"]): one for one in ways["stock"]["measured"]}
    for ran in ways.values():
        for one in ran["measured"]:
            beside = stock.get((one["context"], one["batch"]))
            one["times_as_fast"] = one["answers_equal"] = one["tokens_equal"] = None
            if beside is not None:
                speed = beside["seconds_a_token"]["median"] / one["seconds_a_token"]["median"]
                one["times_as_fast"] = float(f"{speed:.4g}")
                one["answers_equal"], one["tokens_equal"] = agreement(one["tokens"], beside["tokens"])
    for ran in ways.values():
        for one in ran["measured"]:
            del one["tokens"]
    return {
        "question": "the plug-in in vLLM on a GPU: stock's tokens at full budget, and decoding against stock's",
        **given,
        "ways": ways,
        "machine": machine(),
        "versions": versions(),
    }


def agreement(found: list[list[int]], expected: list[list[int]]) -> tuple[float, float]:
    """The share of answers that are equal, and of tokens before the first that differs."""
    equal = [a == b for a, b in zip(found, expected, strict=True)]
    same = 0
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            if x != y:
                break
            same += 1
    return round(sum(equal) / len(equal), 4), round(same / sum(map(len, expected)), 4)


def tables(record: dict[str, Any]) -> Iterator[Table]:
    """A row for each way, context and batch."""
    table = Table(box=SIMPLE_HEAD, title=f"{record['model']}, {record['selector']}, budget {record['budget']}")
    for name in ("way", "context", "batch", "ms a token", "times as fast", "tokens equal", "rows read"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way, ran in record["ways"].items():
        for one in ran["measured"]:
            seconds, speed, equal = one["seconds_a_token"]["median"], one["times_as_fast"], one["tokens_equal"]
            share = one["rows_share"]
            table.add_row(
                way,
                f"{one['context']:,}",
                str(one["batch"]),
                f"{1e3 * seconds:.2f}",
                "" if speed is None else f"{speed:.2f}",
                "" if equal is None else f"{equal:.0%}",
                "" if share is None else f"{share:.1%}",
            )
        if "said" in ran:
            table.add_row(way, "failed", "", "", "", "", "")
    yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random", help="random (a Llama of 4 layers), a model's name or its folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--selector", default="quest:page=16")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--contexts", default="8192,32768,130816", help="tokens of a prompt, several separated by commas"
    )
    parser.add_argument("--batches", default="1,8", help="sequences at a time")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, 2 or more")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and torch.compile")
    parser.add_argument("--rehearse", action="store_true", help="at small sizes, on CPUs too")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a process of one way
    parser.add_argument("--given", help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    records.add_options(parser)
    options = parser.parse_args()
    if options.way:
        records.save(run(options.way, argparse.Namespace(**json.loads(options.given))), options.to)
        return
    del options.given, options.to
    if options.rehearse:
        vars(options).update(SMALL, dtype="float32", eager=True, selector="quest:page=32")
    elif not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: --rehearse runs the same at small sizes on CPUs")
    options.contexts = integers(options.contexts, "--contexts") or []
    options.batches = integers(options.batches, "--batches") or []
    if options.tokens < 2:
        parser.error(f"tokens of an answer are 2 or more, got {options.tokens}")
    records.end(measured(options), f"vllm-gpu{'-rehearsal' if options.rehearse else ''}.json", tables, options)


if __name__ == "__main__":
    main()
