"""Whether the weights answer questions about what they read, with full attention and with no more than a window."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from transformers import LlamaForCausalLM

from sparseattn.evaluation.tasks.base import Example
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.registry import example
from sparseattn.evaluation.tasks.run import Method, measure
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.models.sparse_cache import restore
from sparseattn.selectors.baselines.window import Window

QUESTIONS = {4096: 100, 8192: 30, 16384: 6}  # how many of each task, by length
WINDOW_QUESTIONS = 20  # how many of the shortest by a window
TASKS = ("kv", "passkey")  # by which the model is judged to be worth evaluating methods on
FIRST_SEED = 1_000_000  # of the questions here
SHORTER = 64  # tokens: the longest prompts leave the model positions for the answer


def questions(task: str, length: int, count: int) -> Iterator[Example]:
    """Questions whose needles lie anywhere."""
    draw = random.Random(f"{task} {length}")
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        yield example(task, length, draw.random(), seed, spare=SHORTER)


@torch.no_grad()
def answered(model: LlamaForCausalLM, task: str, length: int, count: int) -> float:
    """Return the share of ``count`` questions whose whole answer, to its line's end, is what the model would write.

    One pass over prompt and answer: where every byte of the answer is the likeliest behind those before it, greedy
    decoding writes it.
    """
    right = 0
    for one in questions(task, length, count):
        answer = torch.tensor(list(one.target.encode()))
        ids = torch.tensor(list((one.context + one.question + one.target).encode())[:-1])[None]
        guesses = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].argmax(-1)
        right += bool(guesses.equal(answer))
    return right / count


def answered_by_window(model: LlamaForCausalLM, task: str, length: int, count: int, dense_layers: int) -> float:
    """Return the share answered where all layers behind the first ``dense_layers`` read 4 rows and the last 64 only.

    The context is read densely; the question goes through the window byte by byte, and the answer comes from it.
    """
    decoder, tokens = ModelDecoder(model, dense_layers=dense_layers, queries=False), Tokens(None)
    try:
        prompts = (Prompt.of(one, tokens) for one in questions(task, length, count))
        records = [measure(prompt, [Method(Window())], ["question"], decoder, tokens) for prompt in prompts]
        return sum(one["score"] for (one,) in records) / count
    finally:
        restore(model)


def lookups(model: LlamaForCausalLM) -> dict[str, dict[str, float]]:
    """Return the share answered, by task, then by length with full attention and by dense layers with a window."""
    found: dict[str, dict[str, float]] = {}
    shortest = min(QUESTIONS)
    for task in TASKS:
        found[task] = {f"{length:,}": answered(model, task, length, count) for length, count in QUESTIONS.items()}
        for dense in (0, 1, 2):
            share = answered_by_window(model, task, shortest, WINDOW_QUESTIONS, dense)
            found[task][f"window, {dense} dense"] = share
    return found
