"""Views of the methods that papers compare with: hashing, dropping rows, and RetrievalAttention's table."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.condensing import rows
from scripts.evidence.markdown import bullets, parts, percent, table, text, ticked
from scripts.evidence.views_agreement import Agreed
from scripts.evidence.views_agreement import mean as mean_of
from scripts.evidence.views_traces import Measured, setting, spec
from sparseattn.selectors.registry import SELECTORS

Record: TypeAlias = "Mapping[str, Any]"

MEASURE = "recall@10"  # of Quest's Figure 4
ALIKE = 0.1  # errors whose ratio is less far from 1 than this are called alike
LEAST = 1e-6  # errors below are rounding
FULL = "full"
ENOUGH = 0.5  # share of prompts that full attention answers, below which what others answer says little
AFTER, WITHIN = "question", "prefill"  # protocols: the question comes after the prefill, or is in it


def _name(label: str) -> str:
    """`H2O(scores='decode')` as `h2o`: the method, without its arguments."""
    return spec(label).partition(":")[0]


def _drops(label: str) -> bool:
    name = _name(label)
    return name in SELECTORS and SELECTORS[name].evicts


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# Hashing, as in SAAP's Figure 5


def hashed(record: Record) -> str:
    """Error against what is attended and what is read, a row a method and budget."""
    found = Measured(record)
    lines = [
        [
            f"{ticked(spec(one['label']))}, {one['budget']:,}",
            f"{one['mean.attended']:,.0f}",
            percent(one["mean.attended_share"], 1),
            percent(one["mean.bytes_share"], 1),
            percent(one["mean.relative_error"], 1),
            f"{one['mean.mse']:.1e}",
            percent(one["mean.recovered"]),
        ]
        for one in found.rows
    ]
    one = found.rows[0]
    head = ["selector, budget", "rows", "attended", "bytes read", "relative error", "MSE of the output", "recovered"]
    words = text(f"`{one['trace.model']}`, the text {one['trace']}: {setting(one)}.")
    return parts(words, table(head, lines))


class Curve:
    """A method's error against a cost, over its budgets, linear in the logarithms in between."""

    def __init__(self, found: Measured, label: str, cost: str) -> None:
        mine = [one for one in found.rows if one["label"] == label]
        points = {one[f"mean.{cost}"]: max(one["mean.relative_error"], LEAST) for one in mine}
        self.points = sorted(points.items())

    def at(self, cost: float) -> float | None:
        """The error there; None outside of what was measured."""
        if cost in dict(self.points):  # where a curve of one point, too, is known
            return dict(self.points)[cost]
        for (low, first), (high, second) in zip(self.points, self.points[1:], strict=False):
            if low <= cost <= high:
                part = math.log(cost / low) / math.log(high / low)
                return math.exp((1 - part) * math.log(first) + part * math.log(second))
        return None

    def against(self, other: Curve) -> float | None:
        """This error over the other's, the geometric mean over the places of both where both are known."""
        ratios = []
        for place, _ in (*self.points, *other.points):
            mine, theirs = self.at(place), other.at(place)
            if mine is not None and theirs is not None:
                ratios.append(math.log(mine / theirs))
        return math.exp(sum(ratios) / len(ratios)) if ratios else None


def verdict(ratio: float) -> str:
    """What a ratio of errors says of the first method."""
    return "alike" if abs(ratio - 1) <= ALIKE else "better" if ratio < 1 else "worse"


def holds(every: Sequence[tuple[str, str]], *right: str) -> str:
    """Whether what is seen (words, verdict) is what a paper finds, as the end of a sentence."""
    known = [verdict in right for _, verdict in every if verdict != "unknown"]
    if not known:
        return "is unknown"
    return "agrees" if all(known) else "agrees in part" if any(known) else "does not agree"


def compared(found: Measured, label: str, other: str, cost: str) -> tuple[str, str]:
    """In words and as a verdict, how many times another method's error one has at equal cost."""
    value = Curve(found, label, cost).against(Curve(found, other, cost))
    if value is None:
        return f"{ticked(spec(label))} was not measured where {ticked(spec(other))} was", "unknown"
    return f"{ticked(spec(label))} has {value:.2f} times the error of {ticked(spec(other))}", verdict(value)


def hashed_findings(record: Record) -> str:
    """What SAAP's Figure 5 says, and what is seen here."""
    found = Measured(record)
    labels = found.labels()

    said = functools.partial(compared, found)
    single = [label for label in labels if _name(label) in ("kdeformer", "reformer")]
    pig = [label for label in labels if _name(label) == "magicpig"]
    items = []
    every = [said(label, "Random", "attended") for label in single]
    agrees = holds(every, "alike", "worse")
    items.append(
        f"The paper: KDEformer's and Reformer's hash on a par with random rows or worse. At equal rows attended "
        f"{listed([words for words, _ in every])}. That {agrees}."
    )
    every = [said(label, "Random", "attended") for label in pig]
    agrees = holds(every, "better")
    items.append(
        f"The paper: MagicPIG better than these. At equal rows attended {listed([words for words, _ in every])}. That "
        f"{agrees}."
    )
    if "KMeans" in labels:
        by_cost = {cost: [said("KMeans", label, cost) for label in pig] for cost in ("attended", "bytes_share")}
        sentences = []
        for cost, words in (("attended", "rows attended"), ("bytes_share", "bytes read")):
            clauses = listed([one for one, _ in by_cost[cost]])
            sentences.append(f"At equal {words} {clauses}: that {holds(by_cost[cost], 'better')}.")
        items.append(f"The paper: k-means best. {' '.join(sentences)}")
    else:
        items.append("The paper: k-means best. No artefact of k-means ships for this model, so nothing is said of it.")
        if "IVF" in labels:
            beside = [said("IVF", label, "attended")[0] for label in pig]
            items[-1] += (
                f" `ivf`, whose lists are k-means of this prompt's keys but which reads the best rows in them alone, "
                f"stands beside. At equal rows attended {listed(beside)}."
            )
    return bullets(*items)


# Dropping rows, as in Quest's figures


def steps(record: Record) -> str:
    """Recall of the best ten rows over the decoded tokens: mean, least, and the first and last quarter."""
    found = Measured(record)
    lines = []
    for one in found.rows:
        line = by_step(one)
        part = max(len(line) // 4, 1)
        cells = [sum(line) / len(line), min(line), sum(line[:part]) / part, sum(line[-part:]) / part]
        lines.append([f"{ticked(spec(one['label']))}, {one['budget']:,}", *(f"{cell:.2f}" for cell in cells)])
    words = text(f"{MEASURE}, {setting(found.rows[0])}.")
    return parts(words, table(["selector, budget", "mean", "least", "first quarter", "last quarter"], lines))


def by_step(one: Mapping[str, Any]) -> list[float]:
    """Of a line of `bench --by-step`: the mean over layers at every token."""
    layers = one[f"steps.{MEASURE}"]
    known = [[value for value in at if value is not None] for at in zip(*layers, strict=True)]
    return [sum(values) / len(values) for values in known if values]


def steps_findings(record: Record) -> str:
    """Quest's Figure 4: the recall of H2O is low."""
    found = Measured(record)
    budgets = sorted({one["budget"] for one in found.rows})
    items = []
    for budget in budgets:
        means = {label: _mean(by_step(found.must(label, budget))) for label in found.labels()}
        quest = means["Quest"]
        low = {label: value for label, value in means.items() if _drops(label)}
        words = listed([f"{ticked(spec(label))} {value:.2f}" for label, value in low.items()])
        low_all = all(value < quest for value in low.values())
        items.append(
            f"At {budget:,} rows {words}, `quest` {quest:.2f}. Quest's paper finds H2O's recall low and its own near "
            f"full attention's: {'the order agrees' if low_all else 'the order does not agree'}."
        )
    return bullets(*items)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def agreement_findings(record: Record) -> str:
    """Quest's Table 1 and Figure 6 in kind: the order of methods by divergence at each budget."""
    found = Agreed(record)
    budgets = list(dict.fromkeys(budget for _, budget, _ in found.asked if budget is not None))
    items = []
    for budget in budgets:
        at = {one: mean_of(found.of(one), "kl") for one in found.asked if one[1] == budget}
        order = sorted(at, key=lambda one: at[one])
        words = ", ".join(f"{ticked(spec(one[0]))} {at[one]:.3f}" for one in order)
        quest = next((at[one] for one in order if one[0] == "Quest"), None)
        dropping = [one for one in order if _drops(one[0])]
        better = [ticked(spec(one[0])) for one in dropping if quest is not None and at[one] < quest]
        end = (
            f"Of those that drop rows {listed(better)} {'is' if len(better) == 1 else 'are'} nearer than `quest`, "
            "which Quest's paper does not find."
            if better
            else "Those that drop rows are all farther than `quest`, as Quest's paper finds."
        )
        items.append(f"At {int(budget):,} rows, KL in nats a token: {words}. {end}")
    return bullets(*items)


def bare(alone: Record, beside: Record) -> str:
    """Divergence of methods without sink and window against theirs with both, at as many rows in all."""
    mine, theirs = Agreed(alone), Agreed(beside)
    budgets, others = ({method: _budgets(found, method) for method, _, _ in found.asked} for found in (mine, theirs))
    lines = []
    for method in budgets:
        for own, other in zip(budgets[method], others[method], strict=True):
            at, kept = mine.of((method, own, None)), theirs.of((method, other, None))
            kls = [f"{mean_of(found, 'kl'):.3f}" for found in (at, kept)]
            lines.append([ticked(spec(method)), f"{int(own) + _zones(at):,}", f"{int(other) + _zones(kept):,}", *kls])
    head = ["method", "rows alone", "rows beside", "KL alone", "KL with sink and window"]
    return table(head, lines)


def _budgets(found: Agreed, method: str) -> list[str]:
    return [budget for one, budget, _ in found.asked if one == method and budget is not None]


def _zones(found: Sequence[Mapping[str, Any]]) -> int:
    return int(found[0]["sink"]) + int(found[0]["window"])


def protocols(*records: Record) -> str:
    """Passkeys: a row a method and budget, a column a protocol."""
    return parts(*(part for record in records for part in _protocols(record)))


def _protocols(record: Record) -> list[str]:
    found = rows(record)
    one = found[0]
    said = text(
        f"`{one['model']}`, {_prompts(found)} passkeys at {one['length']:,} tokens, sink {one['sink']}, window "
        f"{one['window']}; share answered, where the question comes after the prefill and where it is in it:"
    )
    lines = []
    for method, budget in dict.fromkeys((each["method"], each["budget"]) for each in found):
        label = "full attention" if method == FULL else ticked(spec(method))
        cells = [_share(found, method, budget, protocol) for protocol in (AFTER, WITHIN)]
        shown = ["" if cell is None else percent(cell) for cell in cells]
        lines.append([label + (f", {int(budget):,}" if budget else ""), *shown])
    return [said, table(["method, budget", "question after the prefill", "question in the prefill"], lines)]


def _prompts(found: Sequence[Mapping[str, Any]]) -> int:
    return sum(each["method"] == FULL and each["protocol"] == AFTER for each in found)


def _share(found: Sequence[Mapping[str, Any]], method: str, budget: str | None, protocol: str) -> float | None:
    """Mean score; None where nothing was asked."""
    wanted = (method, budget, protocol)
    held = [each["score"] for each in found if (each["method"], each["budget"], each["protocol"]) == wanted]
    return _mean(held) if held else None


def protocols_findings(*records: Record) -> str:
    """The case that methods that drop rows cannot serve."""
    items = []
    for record in records:
        found = rows(record)
        model = ticked(found[0]["model"])
        for budget in dict.fromkeys(each["budget"] for each in found if each["budget"] is not None):
            methods = dict.fromkeys(each["method"] for each in found if each["budget"] == budget)
            clauses = []
            for method in methods:
                after, within = (_share(found, method, budget, protocol) or 0.0 for protocol in (AFTER, WITHIN))
                clauses.append(f"{ticked(spec(method))} {percent(after)} and {percent(within)}")
            items.append(
                f"{model} at {int(budget):,} rows, of questions after the prefill and in it: {', '.join(clauses)}."
            )
        items.append(_lost(found, model))
    return bullets(*items)


def _lost(found: Sequence[Mapping[str, Any]], model: str) -> str:
    """What methods that drop rows answer of both kinds of question, over all of them and all budgets."""
    dropping, quest = (
        [
            _mean([one["score"] for one in found if one["protocol"] == protocol and kind(one["method"])])
            for protocol in (AFTER, WITHIN)
        ]
        for kind in (_drops, lambda method: method == "Quest")
    )
    full = _share(found, FULL, None, AFTER) or 0.0
    words = (
        f"{model}, over all budgets: methods that drop rows answer {percent(dropping[0])} of questions after the "
        f"prefill and {percent(dropping[1])} in it, `quest` {percent(quest[0])} and {percent(quest[1])}, full "
        f"attention {percent(full)} of those after it."
    )
    if full < ENOUGH:
        return f"{words} Full attention itself answers too few for a finding."
    if full <= dropping[0]:
        return f"{words} Here nothing is lost by dropping rows."
    if dropping[0] < min(quest[0], dropping[1]):
        return f"{words} The question after the prefill is the case that they do not serve."
    return f"{words} They lose answers, but not by when the question comes alone."


# RetrievalAttention's table, and all methods


def order(record: Record) -> str:
    """The methods of a trace by output error at each budget."""
    found = Measured(record)
    items = []
    for budget in sorted({one["budget"] for one in found.rows}):
        at = {label: found.must(label, budget) for label in found.labels()}
        named = sorted(at, key=lambda label: at[label]["mean.relative_error"])
        words = ", ".join(f"{ticked(spec(label))} {percent(at[label]['mean.relative_error'], 1)}" for label in named)
        items.append(f"Error at {budget:,} rows, the least first: {words}.")
    return bullets(*items)


def everything(record: Record) -> str:
    """Every method of one run, at equal rows and at equal bytes, that with the least error first."""
    machine = record["machine"]
    took = f" took {record['seconds'] / 60:.1f} minutes on {machine['cores']} cores" if record.get("seconds") else ""
    words = [text(f"`sparseattn bench --selector all`{took}: {setting(rows(record)[0])}.")] if took else []
    return parts(*words, at_equal(record))


def at_equal(record: Record) -> str:
    """The methods of a record at equal rows and at equal bytes, the least error first, and why some are not."""
    blocks = []
    said: dict[str, str] = {}  # why a method cannot run at all stands once
    for one in record["by_layer"]:
        at = (
            f"{round(one.get('attended', one['at'])):,} rows"
            if one["equal"] == "rows"
            else f"{percent(one['at'])} of the cache's bytes"
        )
        blocks.append(text(f"`{one['trace']}` at {at}, the least error first:"))
        lines = [
            [
                ticked(spec(method["label"])),
                f"{method['mean']['attended']:,.0f}",
                percent(method["mean"]["bytes_share"], 1),
                percent(method["mean"]["recovered"]),
                percent(method["mean"]["relative_error"], 1),
            ]
            for method in sorted(one["methods"], key=lambda method: method["mean"]["relative_error"])
        ]
        blocks.append(table(["selector", "rows", "bytes", "recovered", "error"], lines))
        fresh = {label: why for label, why in one["left_out"].items() if said.get(label) != why}
        if fresh:
            blocks.append(bullets(*(f"{ticked(_shown(label))}: {why}." for label, why in fresh.items())))
        said |= fresh
    return parts(*blocks)


def _shown(label: str) -> str:
    """A label, or a name of `SELECTORS` that could not be made."""
    return label if label in SELECTORS else spec(label)
