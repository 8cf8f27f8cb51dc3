"""Views of what training SAAP takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from scripts.evidence.markdown import parts, table, text

Record: TypeAlias = "Mapping[str, Any]"

STAGES = ("kmeans", "targets", "classifier")


def time(record: Record) -> str:
    """Seconds a KV head by stage, and what they come to for a model."""
    recipe, traces, model = record["recipe"], record["traces"], record["model"]
    stages, per_head = record["seconds_per_head"], record["minutes_per_head"]
    keys = 256 * recipe["clusters"]  # the sample that k-means takes by itself
    names = {
        "kmeans": f"k-means ({keys:,} keys, {recipe['iterations']} iterations)",
        "targets": f"targets ({100 * record['passed']:.0f} % of queries pass the filters)",
        "classifier": f"classifier, {recipe['steps']:,} steps"
        + (f": extrapolated from {record['steps_measured']}" if record["classifier_extrapolated"] else ""),
    }
    lines = [[names[one], *(f"{stages[one][clock]:.0f}" for clock in ("wall", "processor"))] for one in STAGES]
    lines.append(["together", *(f"{60 * per_head[clock]:.0f}" for clock in ("wall", "processor"))])
    before = text(
        f"The paper's sizes: {recipe['clusters']:,} buckets, hidden width {recipe['hidden']:,}, D = {traces['size']}, "
        f"G = {traces['group']}, {traces['prompts']} prompts of {traces['tokens']:,} tokens, {recipe['queries']:,} "
        f"queries a head; {record['threads']} cores ({record['machine']['processor']}) shared with other work, hence "
        "the processor time beside."
    )
    after = text(
        f"That is {per_head['wall']:.1f} minutes a head, {per_head['processor']:.1f} of processor time, and "
        f"{model['hours']['wall']:.0f} hours for {model['layers']} layers of {model['heads']} heads; the paper names "
        f"{record['paper_gpu_minutes_per_head']} minutes a head on one GPU, {model['paper_gpu_hours']:.0f} GPU-hours, "
        "and neither its number of prompts nor of steps. Where heads look nearby, up to four candidates are looked at "
        "for a query that passes, so that targets take up to four times as long."
    )
    head = ["seconds a KV head", "on the wall", "of processor time"]
    return parts(before, table(head, lines), after)


def plan(record: Record) -> str:
    """The hours that the recipe for an 8B model takes."""
    per_head, model = record["minutes_per_head"], record["model"]
    return text(
        f"**Hours of training** are layers x H x {per_head['processor']:.1f} minutes of processor time "
        f"({per_head['wall']:.1f} on the wall of {record['threads']} shared cores): {model['hours']['processor']:.0f} "
        f"to {model['hours']['wall']:.0f} for this model ([below](#what-training-takes))."
    )


def saap(record: Record) -> str:
    """The same in a sentence, for SAAP's page."""
    per_head, recipe = record["minutes_per_head"], record["recipe"]
    return text(
        f"At the paper's sizes (hidden width {recipe['hidden']:,}, D = {record['traces']['size']}, prompts of "
        f"{record['traces']['tokens']:,} tokens) a head takes {per_head['wall']:.1f} minutes on two shared cores "
        f"({per_head['processor']:.1f} of processor time), of which the classifier's last "
        f"{recipe['steps'] - record['steps_measured']:,} steps of {recipe['steps']:,} are extrapolated; the paper "
        f"names {record['paper_gpu_minutes_per_head']} minutes on a GPU. [Training](training.md) is the guide, with "
        "the recipe for an 8B model: its disk, memory and hours."
    )


def memory(record: Record) -> str:
    """Peak memory by number of prompts."""
    measured = record["table"]
    peaks = ", ".join(f"{one['memory_mib']:,.0f}" for one in measured)
    prompts = ", ".join(str(one["prompts"]) for one in measured)
    return text(
        f"**Memory** does not grow with the number of prompts. Peak of a fresh process, {record['traces']['heads']} "
        f"head, prompts of {record['traces']['tokens']:,} tokens ({record['trace_mib']:.0f} MiB a trace), "
        f"{record['recipe']['queries']:,} queries: {peaks} MiB with {prompts} prompts. It falls, because the targets "
        "of a prompt leave holes in glibc's heap, and of more prompts each gives fewer; a fixed "
        "`MALLOC_MMAP_THRESHOLD_` avoids them ([log](log/2026-11.md))."
    )


def heads(record: Record) -> str:
    """Steps of all heads together against one after another."""
    small = [one for one in record["table"] if one["sizes"] == "small"]
    paper = [one for one in record["table"] if one["sizes"] == "paper"]

    def ms(one: Mapping[str, Any], way: str) -> float:
        return float(1e3 * one[f"seconds_per_step_{way}"]["processor"])

    lines = []
    for a, b in zip(small, paper, strict=True):
        cells = [f"{ms(a, way):.1f}" for way in ("apart", "together")] + [
            f"{ms(b, way):,.0f}" for way in ("apart", "together")
        ]
        lines.append([str(a["heads"]), *cells])
    one, most = small[0], paper[-1]
    before = text(
        "**Heads together.** All heads of a layer take a step as batched products. Processor milliseconds of a step, "
        f"one after another against together, medians of {record['repeats']} on cores with some other work:"
    )
    gains = [a["speed_up_processor"] for a in small[1:]]
    after = text(
        f"So small classifiers gain {min(gains):.0f} to {max(gains):.0f} times. The paper's gain nothing on a CPU, "
        f"which one head's products fill; {most['heads']} heads together take "
        f"{ms(most, 'together') / ms(most, 'apart'):.1f} times as long, because their numbers no longer fit the "
        "caches. GPUs, which a single head leaves idle, were not measured."
    )
    sizes = f"small sizes (C {one['clusters']}, F {one['hidden']}, D {one['size']}, batch {one['batch']})"
    shown = table(["heads", f"{sizes}: apart", "together", "the paper's: apart", "together"], lines, left=0)
    return parts(before, shown, after)
