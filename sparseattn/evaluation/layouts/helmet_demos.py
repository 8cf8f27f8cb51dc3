"""The two examples before a question in HELMET's sets of passages: drawn from a second file by the question's hash."""

from __future__ import annotations

import functools
import hashlib
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparseattn.evaluation.layouts.base import Setup
from sparseattn.evaluation.layouts.fields import answers, number, text
from sparseattn.evaluation.layouts.files import lines

SHOTS = 2
SEEDS = 2**31


class Demos:
    """Draws examples as `datasets` shuffles: by numpy's generator, whose seed is the hash of a question's key.

    Args:
        setup: of the file of questions; `demos` is the second file.
        templates: HELMET's `demo_template` and `passage_template` of questions.
    """

    def __init__(self, setup: Setup, templates: Mapping[str, str]) -> None:
        self.setup, self.templates = setup, templates

    @functools.cached_property
    def all(self) -> list[dict[str, Any]]:
        """The lines of the second file."""
        if self.setup.demos is None:
            raise ValueError("its examples come from a second file of HELMET's: name it with --demos")
        return [dict(line.fields) for line in lines(self.setup.demos)]

    @functools.cached_property
    def asked(self) -> set[str]:
        """The keys of all questions to rank by."""
        return {str(line.fields.get("qid")) for line in lines(self.setup.path)}

    def questions(self, fields: Mapping[str, Any], data_set: str, popular: float) -> dict[str, Any]:
        """Return what fills the template of a question over passages.

        Args:
            fields: of the line.
            data_set: HELMET's name.
            popular: of `kilt_popqa_3`, the popularity in powers of ten from which on an example is none.
        """
        key = "id" if "id" in fields else "question"
        shown = self.all
        if "popqa" in data_set:
            shown = [demo for demo in shown if popularity(demo) < popular and demo.get(key) != fields[key]]
        question = text(fields, "question")
        demos = "".join(map(self._shown, _drawn(shown, key, str(fields[key]))))
        context, right = _passages(fields, self.templates["passage_template"]), _answers(fields)
        return {"question": question, "demos": demos, "context": context, "right": right}

    def _shown(self, demo: dict[str, Any]) -> str:
        """Return an example over passages as it stands before a question."""
        template, passage = self.templates["demo_template"], self.templates["passage_template"]
        return self._made(demo, lambda demo: _answered(demo, template, passage))

    def _made(self, demo: dict[str, Any], make: Callable[[dict[str, Any]], str]) -> str:
        """Return what `make` makes of an example; ValueError naming its place in the second file."""
        try:
            return make(demo)
        except (KeyError, ValueError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"example {self.all.index(demo) + 1} of {self.setup.demos}: {what}") from None

    def rerank(self, fields: Mapping[str, Any], titled: str, untitled: str) -> dict[str, Any]:
        """Return what fills the template of a ranking; passages with and without titles have a template each."""
        qid = text(fields, "qid")
        known = self.asked if len(self.all) > 2 * len(self.asked) else {qid}
        passage = titled if "title" in _held(fields)[0] else untitled
        drawn = _drawn([demo for demo in self.all if demo.get("qid") not in known], "qid", qid)
        demos = "".join(self._made(demo, lambda demo: _ranked(demo, passage)) for demo in drawn)
        context, right = _passages(fields, passage), [_ranking(fields)]
        return {"question": text(fields, "query"), "demos": demos, "context": context, "right": right}


def _answered(demo: Mapping[str, Any], template: str, passage: str) -> str:
    return template.format(**{**demo, "documents": _passages(demo, passage), "answer": _answers(demo)[0]}) + "\n\n"


def _ranked(demo: Mapping[str, Any], passage: str) -> str:
    return f"{_passages(demo, passage)}\n\nQuery: {text(demo, 'query')}\nRanking: {_ranking(demo)}\n\n"


def _drawn(shown: Sequence[dict[str, Any]], key: str, value: str) -> list[dict[str, Any]]:
    """`SHOTS` examples with keys of their own."""
    import numpy

    seed = int(hashlib.sha256(value.encode()).hexdigest(), 16) % SEEDS
    distinct: dict[str, dict[str, Any]] = {}
    for place in numpy.random.default_rng(seed).permutation(len(shown)):
        distinct.setdefault(str(shown[place].get(key)), shown[place])
    if len(distinct) < SHOTS:
        raise ValueError(f"the file of --demos has {SHOTS} examples with another {key} or more, got {len(distinct)}")
    return list(distinct.values())[:SHOTS]


def popularity(fields: Mapping[str, Any]) -> float:
    """Return how popular what a question asks about is, in powers of ten."""
    return math.log10(number(fields, "s_pop"))


def relevance(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the label of each passage of a ranking by its ID, in the order of the passages."""
    return {text(passage, "id"): number(passage, "label", least=0) for passage in _held(fields)}


def _held(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    passages = fields.get("ctxs")
    if not isinstance(passages, list) or not passages or not all(isinstance(passage, dict) for passage in passages):
        raise ValueError(f"ctxs are a list of passages, each an object, got {reprlib.repr(passages)}")
    return passages


def _passages(fields: Mapping[str, Any], template: str) -> str:
    try:
        return "\n\n".join(template.format(**passage) for passage in _held(fields))
    except (KeyError, TypeError) as error:
        raise ValueError(f"a passage of ctxs has what {template!r} names: {error}") from None


def _ranking(fields: Mapping[str, Any]) -> str:
    labels = relevance(fields)
    return " > ".join(sorted(labels, key=lambda name: labels[name], reverse=True))


def _answers(fields: Mapping[str, Any]) -> tuple[str, ...]:
    return answers({"answers": _flat(fields.get("answers"))}, "answers")


def _flat(value: Any) -> Any:
    """Answers that stand in lists of lists, as HELMET takes them, in one list."""
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, list) else [value]
