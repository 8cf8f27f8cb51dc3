"""The prompts that the artefact is judged by: texts, source code and needles that nothing was trained on."""

from __future__ import annotations

from typing import Any

from scripts.smollm2.windows import TOKENS, Window
from sparseattn.integrations.models import encode
from sparseattn.tasks import example
from sparseattn.texts import TEXTS, read_named

READ = ("alice", "workshop", "click")  # the first tokens of each
ASKED = ("passkey", "kv")  # prompts with the answer behind them, which the last tokens are


def prompts(tokenizer: Any, tokens: int = TOKENS) -> list[Window]:
    """All prompts, of `tokens` tokens or (needles) a few less."""
    found = []
    for text in READ:
        ids = encode(tokenizer, read_named(text).encode())[:, :tokens]
        found.append(Window(text, True, ids, {"name": text, "sha256": TEXTS[text].sha256}))

    def count(text: str) -> int:
        return encode(tokenizer, text.encode()).shape[1]

    for task in ASKED:
        made = example(task, tokens, depth=0.5, seed=0, count=count, spare=16)
        ids = encode(tokenizer, (made.context + made.question + made.target).encode())
        found.append(Window(task, True, ids[:, -tokens:], {"name": task, **made.meta}))
    return found


def kind(prompt: str) -> str:
    """What a prompt is, in a word or two."""
    return TEXTS[prompt].kind if prompt in TEXTS else {"passkey": "needle", "kv": "records"}[prompt]
