"""A tiny model of bytes with a tokenizer, and tasks over local files, as lm-eval reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import small

CONTEXT = "The harbour master counts boats, and the baker counts loaves. " * 3
QUESTIONS = ["Who counts boats?", "What does the baker count, and why?", "Whom?"]
ANSWERS = ["the baker", "a boat", "b"]
TASK = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: {kind}
doc_to_text: "{{{{context}}}}{{{{question}}}}"
doc_to_target: {target}
metadata: {{version: 1.0}}
"""
CHOICE = """
doc_to_choice: choices
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATION = """
generation_kwargs: {until: ["zz"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def byte_tokenizer() -> Any:
    """A tokenizer whose ids are those of 256 bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=letters[0], pad_token=letters[0])


def saved_model(folder: Path) -> Path:
    """A folder with a model and its tokenizer."""
    small("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def saved_tasks(folder: Path, answers: list[str] = QUESTIONS) -> Path:
    """A folder with the tasks `made_choice` and `made_answer`, over one file; `answers` are right for the latter."""
    folder.mkdir()
    data = folder / "made.jsonl"
    docs = [
        {"context": CONTEXT, "question": asked, "choices": ANSWERS, "label": number, "answer": right}
        for number, (asked, right) in enumerate(zip(QUESTIONS, answers, strict=True))
    ]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = {"data": json.dumps(str(data))}
    choice = TASK.format(task="made_choice", kind="multiple_choice", target="label", **common) + CHOICE
    answer = TASK.format(task="made_answer", kind="generate_until", target="answer", **common) + GENERATION
    (folder / "made_choice.yaml").write_text(choice)
    (folder / "made_answer.yaml").write_text(answer)
    return folder
