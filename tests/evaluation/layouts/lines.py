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
    "passage_retrieval_en": "{context}\n{input}\nIt is: ",
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


LONGBENCH2 = {
    "_id": "1",
    "domain": "stories",
    "sub_domain": "short",
    "difficulty": "easy",
    "length": "short",
    "question": "Who keeps the lamp?",
    "choice_A": "Ada",
    "choice_B": "Bo",
    "choice_C": "Cy",
    "choice_D": "Di",
    "answer": "A",
    "context": "The lamp is kept by Ada.",
}
KVPRESS = {
    "context": "The lamp is kept by Ada.\n",
    "question": "Who keeps the lamp?",
    "answer_prefix": "The lamp is kept by",
    "answer": ["Ada"],
    "task": "qa_1",
    "max_new_tokens": 32,
}
RULER = {
    "index": 0,
    "input": "Read.\n\nDoc 1: The lamp is kept by Ada.\n\nAnswer from the text.\n\nQuestion: Who keeps the lamp?",
    "outputs": ["Ada"],
    "length": 40,
    "answer_prefix": " Answer:",
    "token_position_answer": 5,
}
TURNS = [
    {"role": "user", "content": "write a line about lamps"},
    {"role": "assistant", "content": "A lamp is warm."},
    {"role": "user", "content": "Prepend aB3 to the 1st line about lamps."},
]
MRCR = {
    "prompt": json.dumps(TURNS),
    "answer": "aB3A lamp is warm.",
    "random_string_to_prepend": "aB3",
    "n_needles": 2,
    "desired_msg_index": 1,
    "total_messages": 3,
    "n_chars": 60,
}
INFINITEBENCH = {
    "id": 0,
    "context": "The lamp is kept by Ada.",
    "input": "Who keeps the lamp?",
    "answer": ["Ada"],
    "options": ["Ada", "Bo", "Cy", "Di"],
}
HELMET = {
    "context": '{"a": "1", "b": "2", "c": "3"}',
    "question": "a",
    "answer": "1",
    "demos": [["b", "2"], ["c", "3"], ["d", "4"]],
    "num_kvs": 3,
}
BABILONG = {"input": " Mary went to the kitchen. It rained. ", "question": "Where is Mary?", "target": "kitchen"}

LONGBENCH2_TEMPLATE = "Read.\n$DOC$\nQ: $Q$\n(A) $C_A$ (B) $C_B$ (C) $C_C$ (D) $C_D$\nSay it."
INFINITEBENCH_TEMPLATES = """
yarn_mistral_templates = {
    "longbook_choice_eng": "Book.\\n{context}\\nQ: {question} A. {OPTION_A} B. {OPTION_B} C. {OPTION_C} D. {OPTION_D}:",
    "code_run": "There is {func}.\\n{context}\\nThe value of {func_call} is",
    "math_find": "{prefix}\\n{context}\\n{input}",
    "math_calc": "Count. {context}:",
    "longbook_qa_eng": "{context}\\nQ: {question} A:",
    "kv_retrieval": "{context}\\n{input}",
    "passkey": "Find it.\\n" + "{context}\\n{input} It is",
}
"""
HELMET_TEMPLATES = """
def load_qa():
    user_template = "Bad. {demos}{context} {question}"
    user_template = "Use them.\\n{demos}{context}\\n\\nQ: {question}"
    system_template = "Answer:"
    demo_template = "{documents}\\n\\nQ: {question}\\nAnswer: {answer}"
    passage_template = "Doc ({title}): {text}"


def load_json_kv():
    user_template = "{context}\\n\\nExtract.\\n\\n{demos}Key: {question}"
    system_template = "Corresponding value:"


def load_msmarco_rerank():
    user_template = "Rank.\\n{demos}{context}\\n\\nQuery: {question}"
    system_template = "Ranking:"

    def update(sample):
        passage_template = "[{id}] ({title}) {text}" if "title" in sample else "[{id}] {text}"


def load_ruler(dataset):
    user_template = "{context}"
    system_template = "Answer:"
    if "niah_mv" in dataset:
        user_template = "Many {type_needle_v}.\\n{context}\\nWhat are {query}?"
        system_template = "They are"
    elif "niah" in dataset:
        user_template = "One {type_needle_v}.\\n{context}\\nWhat is {query}?"
        system_template = "It is"
    elif "vt" in dataset:
        user_template = "{example}Track.\\n{context}\\nQ: {query}"
        system_template = "Answer: {num_v} of {query}:"
    elif "cwe" in dataset:
        user_template = "{example}Count.\\n{context}\\nQ."
        system_template = "Answer: ten:"
    elif "fwe" in dataset:
        user_template = "Codes.\\n{context}\\nQ."
        system_template = "Answer: three:"
    elif "qa" in dataset:
        user_template = "Docs.\\n{context}\\nQ: {question}"
        system_template = "Answer:"
"""
BABILONG_TEMPLATES = """
TASK = "{instruction}\\n{examples}\\n{post_prompt}"
DEFAULT_TEMPLATE = f"{TASK}\\n<context>\\n{'{context}'}\\n</context>\\nQ: " + "{question}"
DEFAULT_PROMPTS = {
    "qa1": {"instruction": "Say where.", "examples": "Ann is out." " So: out.", "post_prompt": "One word."},
}
"""


def published(folder: Path) -> Path:
    """A folder with files of prompts as clones of all benchmarks have them, of other words."""
    for path, words in {
        "LongBench/config/dataset2prompt.json": json.dumps(LONGBENCH_TEMPLATES),
        "prompts/0shot.txt": LONGBENCH2_TEMPLATE,
        "src/prompt.py": INFINITEBENCH_TEMPLATES,
        "data.py": HELMET_TEMPLATES,
        "babilong/prompts.py": BABILONG_TEMPLATES,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(words)
    return folder
