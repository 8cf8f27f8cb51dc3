"""Lines in the form of each benchmark, written for these tests, and files of prompts in the form of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparseattn.evaluation.layouts.base import Setup
from sparseattn.evaluation.layouts.registry import PromptFile, read_prompts

LONGBENCH = {
    "input": "Who keeps the lamp?",
    "context": "The lamp is kept by Ada.",
    "answers": ["Ada", "Ada Byron"],
    "length": 6,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}
LONGBENCH_TEMPLATES = {
    "qasper": "Article: {context}\n\nQ: {input}\nA:",
    "trec": "Kinds.\n{context}\n{input}",
    "samsum": "Sum up. {context}\n\n{input}",
    "lcc": "Go on.\n{context}Next:\n",
}


def write(path: Path, *records: object) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, layout: str | None = None, **setup: Any) -> PromptFile:
    """A file, as the command reads it."""
    return read_prompts(path, Setup(path, **setup), layout)
