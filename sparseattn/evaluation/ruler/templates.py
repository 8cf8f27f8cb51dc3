"""The words of RULER's prompts and the settings of its tasks, as data.

They are those of https://github.com/NVIDIA/RULER (`scripts/data/synthetic/constants.py`, `scripts/synthetic.yaml`;
Copyright 2024 NVIDIA CORPORATION, Apache-2.0), unchanged: a benchmark's words are the benchmark. The code that fills
them is ours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """The words around a context, with the places of `str.format`.

    Args:
        head: before the context.
        ask: behind it.
        lead: the beginning of the answer, the last words of the prompt.
        answer_tokens: tokens that a model may answer with.
    """

    head: str
    ask: str
    lead: str
    answer_tokens: int


NEEDLES = Template(
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
    128,
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
# The words above, of one answer.
ONE = (("Some", "A"), ("are all", "is"), ("are", "is"))
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

VARIABLES = Template(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    "\nQuestion: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {number} variables are assigned the "
    "value {query}, they are: ",
    30,
)
COMMON_WORDS = Template(
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n",
    "\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    120,
)
FREQUENT_WORDS = Template(
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. ",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    50,
)
QUESTIONS = Template(
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n",
    "\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other words."
    "\n\nQuestion: {query}",
    " Answer:",
    32,
)
DOCUMENT = "Document {number}:\n{document}"


@dataclass(frozen=True)
class Hidden:
    """A task of needles.

    Args:
        haystack: "noise" (five sentences again and again), "essay" (a text), or "needle" (others of the needle's form).
        keys: what needles are named by, "words" or "uuids".
        values: what they hold, "numbers" or "uuids".
        named: keys in the context.
        each: values of a key.
        asked: keys that the question names.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    named: int = 1
    each: int = 1
    asked: int = 1


HIDDEN = {
    "niah_single_1": Hidden("noise"),
    "niah_single_2": Hidden("essay"),
    "niah_single_3": Hidden("essay", values="uuids"),
    "niah_multikey_1": Hidden("essay", named=4),
    "niah_multikey_2": Hidden("needle"),
    "niah_multikey_3": Hidden("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Hidden("essay", each=4),
    "niah_multiquery": Hidden("essay", named=4, asked=4),
}
