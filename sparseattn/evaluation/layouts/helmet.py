"""HELMET (https://arxiv.org/abs/2410.02694): the data sets that it publishes as files and scores without a judge.

Those are recall (`json_kv` and RULER's tasks in its form), questions over passages (`kilt_...`) and ranking
(`msmarco_rerank_psg`), with its two examples before the question. Its other sets are made from the hub with Llama 2's
tokenizer, or scored by a model. Every line of a file is asked; HELMET draws 100 of them.
"""

from __future__ import annotations

import ast
import reprlib
from collections.abc import Mapping
from typing import Any

from sparseattn.evaluation.layouts import helmet_demos
from sparseattn.evaluation.layouts.base import Layout, Line, Reader, Setup
from sparseattn.evaluation.layouts.fields import answers, names_of, task_of, text, texts
from sparseattn.evaluation.layouts.templates import Published, Templates, assignments, load, tree
from sparseattn.evaluation.tasks.base import Chat, Example

PUBLISHED = Published(
    "https://github.com/princeton-nlp/HELMET",
    "4526dfb",
    "data.py",
    "a47c53d5f42d67468f920ebe8d38058d571fafba5eab5c1c54365cc23f3d4b55",
)
# RULER's names of a task -> HELMET's; a data set -> tokens of an answer at most.
RULER = {
    **{f"niah_single_{number}": f"ruler_niah_s_{number}" for number in (1, 2, 3)},
    **{f"niah_multikey_{number}": f"ruler_niah_mk_{number}" for number in (1, 2, 3)},
    "niah_multiquery": "ruler_niah_mq",
    "niah_multivalue": "ruler_niah_mv",
    **{name: f"ruler_{name}" for name in ("cwe", "fwe", "vt", "qa_1", "qa_2")},
}
KILT = ("kilt_nq", "kilt_triviaqa", "kilt_hotpotqa", "kilt_popqa_3")
RERANK = "msmarco_rerank_psg"
LIMITS = {
    "json_kv": 100,
    **dict.fromkeys(KILT, 20),
    RERANK: 200,
    **dict.fromkeys(RULER.values(), 50),
    **dict.fromkeys(("ruler_niah_mk_3", "ruler_niah_mq", "ruler_cwe"), 100),
}
FILES = {**RULER, "msmarco": RERANK, **{name.split("_")[1]: name for name in KILT}}  # what its files are called after
# Where its code gives a data set of RULER its templates: the first pair there is for none of them.
RULER_PLACES = (("niah_mv", "niah_mq"), ("niah",), ("vt",), ("cwe",), ("fwe",), ("qa",))
POPULAR = 3  # questions about what is more popular, in powers of ten, are no part of `kilt_popqa_3`
HOLE = "\0context\0"


def template(published: Templates, data_set: str) -> tuple[str, str]:
    """Return the user's turn and the beginning of an answer, as HELMET's functions assign them."""
    function = {"json_kv": "load_json_kv", RERANK: "load_msmarco_rerank"}.get(data_set, "load_qa")
    place = -1
    if data_set.startswith("ruler_"):
        function = "load_ruler"
        place = 1 + next(i for i, names in enumerate(RULER_PLACES) if any(name in data_set for name in names))
    texts = texts_of(published, function)
    users, systems = ([value for name, value in texts if name == f"{who}_template"] for who in ("user", "system"))
    return users[place], systems[place]


def texts_of(published: Templates, function: str) -> list[tuple[str, str]]:
    """Return the texts that a function of the file assigns, in order. ValueError where there is no such function."""
    for node in tree(published.text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [(name, value) for name, value in assignments(node) if isinstance(value, str)]
    raise ValueError(f"the file of prompts has no function {function}")


def data_set_of(setup: Setup, line: Line) -> str:
    """Return HELMET's name of a line's data set."""
    if "docs" in line.fields:
        raise ValueError("docs are of ALCE, whose citations HELMET has a model judge: it is not scored here")
    known = list(LIMITS)
    names = [FILES.get(name.partition("_test")[0], name) for name in names_of(line.path)]
    return task_of(setup.task, names, known, "helmet")


def _open(setup: Setup) -> Reader:
    published = load(PUBLISHED, setup)
    if not published.facts["templates_checked"]:
        raise ValueError(
            f"its prompts are told apart by their order in {PUBLISHED.path}, and this file is not that of commit "
            f"{PUBLISHED.commit}"
        )
    return reader(setup, published)


def reader(setup: Setup, published: Templates) -> Reader:
    """Return the reader of a file's lines, with the templates of a published file."""
    demos = helmet_demos.Demos(setup, dict(texts_of(published, "load_qa")))
    rerank = [value for name, value in texts_of(published, "load_msmarco_rerank") if name == "passage_template"]

    def read(line: Line) -> Example | None:
        data_set = data_set_of(setup, line)
        fields = dict(line.fields)
        if data_set == "kilt_popqa_3" and helmet_demos.popularity(fields) >= POPULAR:
            return None
        if data_set == RERANK:
            filled = demos.rerank(fields, *rerank)
        elif data_set in KILT:
            filled = demos.questions(fields, data_set, POPULAR)
        else:
            filled = _json_kv(fields) if data_set == "json_kv" else _ruler(fields)
        return _example(data_set, template(published, data_set), fields, filled, setup.chat, published.facts)

    return read


def _json_kv(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a line of `json_kv` fills its template with; its examples are its own first pairs."""
    shown = fields.get("demos")
    pairs = [pair for pair in shown if isinstance(pair, list) and len(pair) == 2] if isinstance(shown, list) else []
    if len(pairs) < helmet_demos.SHOTS:
        raise ValueError(f"demos are {helmet_demos.SHOTS} pairs of key and value or more, got {reprlib.repr(shown)}")
    lines = [f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in pairs[: helmet_demos.SHOTS]]
    return {**fields, "demos": "".join(lines), "right": answers(fields, "answer")}


def _ruler(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a line of RULER's tasks in HELMET's form fills its template with."""
    example = fields.get("example") or ""
    question = fields.get("query", fields.get("question", ""))
    right = answers(fields, "answer", "outputs")
    return {**fields, "question": question, "example": f"{example}\n\n" if example else "", "right": right}


def _metric(data_set: str) -> str:
    if data_set == RERANK:
        return "helmet/ndcg"
    recall = data_set.startswith("ruler_") and "qa" not in data_set
    return "helmet/ruler_recall" if recall else "helmet/substring_match"


def _example(
    data_set: str,
    templates: tuple[str, str],
    fields: Mapping[str, Any],
    filled: Mapping[str, Any],
    chat: bool,
    facts: Mapping[str, Any],
) -> Example:
    """Return the example of a line whose template is filled with `filled`, of which `right` are the answers."""
    try:
        user, begun = (part.format(**{**filled, "context": HOLE}) for part in templates)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a line of {data_set} has what its template names: {error}") from None
    before, _, question = user.partition(HOLE)
    reference: dict[str, Any] = {"begun": "" if chat else begun}
    if data_set == RERANK:
        reference["labels"] = helmet_demos.relevance(fields)
    reference["lead"] = "corresponding value:" if data_set == "json_kv" else "Answer:"
    return Example(
        f"helmet/{data_set}",
        before + text(filled, "context"),
        f"{question}\n{begun}",
        texts(filled, "right"),
        _metric(data_set),
        dict(facts),
        lead=begun,
        limit=LIMITS[data_set],
        one_line=data_set in (*KILT, RERANK),
        chat=Chat(question),
        reference=reference,
    )


def _fits(line: Line) -> bool:
    names = line.fields.keys()
    made = "context" in names and ("type_needle_v" in names or ("outputs" in names and not names & {"input", "prompt"}))
    passages = "ctxs" in names and bool(names & {"question", "query"})
    return made or passages or ("docs" in names and "question" in names) or {"context", "demos"} <= names


LAYOUT = Layout(
    "helmet",
    "HELMET, https://arxiv.org/abs/2410.02694",
    frozenset(
        {
            *(
                "context",
                "question",
                "answer",
                "answers",
                "demos",
                "ctxs",
                "docs",
                "query",
                "qid",
                "outputs",
                "example",
            ),
            *("type_needle_v", "num_v", "s_pop", "id"),
        }
    ),
    frozenset({"num_kvs", "index", "length"}),
    _fits,
    _open,
)
