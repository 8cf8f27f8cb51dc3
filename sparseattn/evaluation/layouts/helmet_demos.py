"""The two examples before a question in HELMET's sets of passages: drawn from a second file by the question's hash."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparseattn.evaluation.layouts.base import Setup
from sparseattn.evaluation.layouts.fields import answers, text
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
            shown = [one for one in shown if math.log10(one["s_pop"]) < popular and one[key] != fields[key]]
        drawn = _drawn(shown, key, str(fields[key]))
        passage = self.templates["passage_template"]
        demos = "".join(
            self.templates["demo_template"].format(
                **one, documents=_passages(one, passage), answer=_flat(one["answers"])[0]
            )
            + "\n\n"
            for one in drawn
        )
        right = answers({"answers": _flat(fields.get("answers"))}, "answers")
        return {
            "question": text(fields, "question"),
            "demos": demos,
            "context": _passages(fields, passage),
            "right": right,
        }

    def rerank(self, fields: Mapping[str, Any], titled: str, untitled: str) -> dict[str, Any]:
        """Return what fills the template of a ranking; passages with and without titles have a template each."""
        qid = text(fields, "qid")
        known = self.asked if len(self.all) > 2 * len(self.asked) else {qid}
        passage = titled if "title" in fields["ctxs"][0] else untitled
        drawn = _drawn([one for one in self.all if one["qid"] not in known], "qid", qid)
        demos = "".join(
            f"{_passages(one, passage)}\n\nQuery: {one['query']}\nRanking: {_ranking(one)}\n\n" for one in drawn
        )
        question = text(fields, "query")
        return {
            "question": question,
            "demos": demos,
            "context": _passages(fields, passage),
            "right": [_ranking(fields)],
        }


def _drawn(shown: Sequence[dict[str, Any]], key: str, value: str) -> list[dict[str, Any]]:
    """`SHOTS` examples with keys of their own."""
    import numpy

    seed = int(hashlib.sha256(value.encode()).hexdigest(), 16) % SEEDS
    found: dict[Any, dict[str, Any]] = {}
    for place in numpy.random.default_rng(seed).permutation(len(shown)):
        found.setdefault(shown[place][key], shown[place])
    if len(found) < SHOTS:
        raise ValueError(f"the file of --demos has {SHOTS} examples with another {key} or more, got {len(found)}")
    return list(found.values())[:SHOTS]


def _passages(fields: Mapping[str, Any], template: str) -> str:
    held = fields.get("ctxs")
    if not isinstance(held, list) or not all(isinstance(passage, dict) for passage in held):
        raise ValueError(f"ctxs are a list of passages, got {type(held).__name__}")
    try:
        return "\n\n".join(template.format(**passage) for passage in held)
    except KeyError as error:
        raise ValueError(f"a passage of ctxs has {error.args[0]}") from None


def _ranking(fields: Mapping[str, Any]) -> str:
    best = sorted(fields["ctxs"], key=lambda passage: passage["label"], reverse=True)
    return " > ".join(passage["id"] for passage in best)


def _flat(value: Any) -> Any:
    """Answers that stand in lists of lists, as HELMET takes them, in one list."""
    return [one for item in value for one in _flat(item)] if isinstance(value, list) else [value]
