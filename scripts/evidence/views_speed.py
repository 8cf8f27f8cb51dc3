"""Views of speed: one decode step, how it grows, and tokens a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from scripts.evidence.markdown import bullets, parts, significant, table, text, ticked

Record: TypeAlias = "Mapping[str, Any]"

BF16, FP32 = "bfloat16", "float32"
SAAP = "`saap` (random weights)"


@dataclass(frozen=True)
class Way:
    """A selector in one run, by dtype."""

    of: Mapping[str, Mapping[str, Any]]

    def ms(self, dtype: str) -> float:
        return 1e3 * self.of[dtype]["seconds"]["step"]["median"]

    def cells(self, dtype: str) -> list[str]:
        """Milliseconds, times as fast as dense, and what the bytes would allow."""
        one = self.of[dtype]
        return [significant(self.ms(dtype)), _times(one["speed_up"]["median"]), f"{one['bound']:.1f}"]

    def dense(self, dtype: str) -> float:
        """Milliseconds of the fastest dense way, as timed beside it."""
        one = self.of[dtype]
        return 1e3 * one["seconds"][f"dense:{one['dense']}"]["median"]


def timed(record: Record, selector: str) -> Way:
    """One selector of a record of `benchmarks.speed`; LookupError where it was not timed."""
    found = {
        one["dtype"]: method
        for one in record["results"]
        for method in one["selectors"]
        if method["selector"].partition("@")[0] == selector
    }
    if not found:
        raise LookupError(f"the record has no step of {selector}")
    return Way(found)


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def machine_of(record: Record) -> str:
    machine = record["machine"]
    devices = [one["name"] for one in machine["cuda_devices"]]
    return devices[0] if devices else f"{record['threads']} cores ({machine['processor']})"


def setting_of(record: Record) -> str:
    shape = record["results"][0]
    return (
        f"one step (select and attend) of one layer with {shape['rows']:,} rows, {shape['heads']} KV heads of "
        f"{shape['group']} query heads, D {shape['size']}"
    )


def _graph_name(record: Record) -> str:
    one = timed(record, "retrieval:share=0.25").of[BF16]
    return f"`retrieval`, {one['sink'] + one['window']} rows dense and {one['budget']} found"


def short(speed: Record) -> str:
    """README's sentences."""
    quest = timed(speed, "quest")
    of = {name: timed(speed, name).cells(BF16) for name in ("quest", "lowbit", "twostage", "saap", "kmeans")}
    times = ", ".join(f"`{name}` {cells[0]} ms ({cells[1]} times as fast)" for name, cells in of.items())
    return text(
        f"On {machine_of(speed)} {setting_of(speed)}, bfloat16, budget {speed['budget']:,} and cold caches, takes the "
        f"fastest of torch's seven dense ways {significant(quest.dense(BF16))} ms, {times} "
        "([more](docs/results/speed.md))."
    )


def long(speed: Record, int8: Record, graph: Record) -> str:
    """The table of both dtypes."""
    words = text(
        f"The table times {setting_of(speed)} and budget {speed['budget']:,}, on {machine_of(speed)} with caches "
        'emptied before each call. "To dense" compares it with the fastest of seven dense ways of torch\'s in the same '
        "rounds. The bound is dense's bytes over those that the method must read:"
    )
    quest = timed(speed, "quest")
    lines = [["dense", significant(quest.dense(BF16)), "1", "", significant(quest.dense(FP32)), "1", ""]]
    for name, way in (
        ("`quest`", quest),
        ("`quest:int8=True`", timed(int8, "quest:int8=True")),
        ("`quest:page=8,int8=True`", timed(int8, "quest:page=8,int8=True")),
        ("`lowbit`", timed(speed, "lowbit")),
        ("`twostage`", timed(speed, "twostage")),
        ("`saap` (random weights, C and hidden width 1,024)", timed(speed, "saap")),
        ("`kmeans`", timed(speed, "kmeans")),
        ("`moments`", timed(speed, "moments")),
        (_graph_name(graph), timed(graph, "retrieval:share=0.25")),
        ("`bridge:share=0.25`", timed(graph, "bridge:share=0.25")),
    ):
        lines.append([name, *way.cells(BF16), *way.cells(FP32)])
    head = ["", "bf16: ms", "to dense", "bytes bound", "fp32: ms", "to dense", "bytes bound"]
    return parts(words, table(head, lines))


def around(speed: Record) -> str:
    """Choosing, attending and the whole step, the shortest step first."""
    words = text(
        f"The table times {setting_of(speed)}, bfloat16 and budget {speed['budget']:,}, on {machine_of(speed)} with "
        "caches emptied before each call; medians in milliseconds. Building is the index of the whole context, in "
        "seconds."
    )
    (one,) = speed["results"]
    lines = []
    for method in sorted(one["selectors"], key=lambda method: float(method["seconds"]["step"]["median"])):
        times = [significant(1e3 * method["seconds"][part]["median"]) for part in ("select", "attend", "step")]
        built = significant(method["prefill_seconds"]["index"]["wall"])
        lines.append([ticked(method["selector"]), *times, _times(method["speed_up"]["median"]), built])
    return parts(words, table(["", "choosing", "attending", "step", "to dense", "building"], lines))


def notes(speed: Record, int8: Record, graph: Record) -> str:
    """What is to be known of the table."""
    quest, again, saap = timed(speed, "quest"), timed(int8, "quest"), timed(speed, "saap")
    walked = timed(graph, "retrieval:share=0.25")
    ranged = quest.of[BF16]["speed_up"]
    appending = [100 * way.of[dtype]["append"]["share_of_step"] for way in (quest, saap) for dtype in (BF16, FP32)]
    pauses = sorted(one["append"]["longest_pause_seconds"] for one in walked.of.values())
    inserting = [one["append"]["share_of_step"] for one in walked.of.values()]
    return bullets(
        "The rows of `int8` come from a run of their own, and so do those of `retrieval` and `bridge`. In `int8`'s "
        f"run plain `quest` took {significant(again.ms(BF16))} ms and was {again.cells(BF16)[1]} times as fast as "
        f"dense in bf16 ({significant(again.ms(FP32))} ms and {again.cells(FP32)[1]} times in fp32): compare `int8` "
        "with these.",
        f"These are medians. Rounds range widely (Quest in bf16 from {ranged['min']:.1f} to {ranged['max']:.1f}), and "
        f"runs differ (Quest in bf16 {quest.cells(BF16)[1]} and {again.cells(BF16)[1]}; [log](../log/2026-11.md)).",
        f"Appending a token, seals included, is {min(appending):.0f} to {max(appending):.0f} % of a step for Quest "
        "and SAAP.",
        f"`retrieval` inserts {graph['seal']:,} rows at a time, {pauses[0]:.0f} to {pauses[-1]:.0f} s for "
        f"{graph['heads'] * graph['group']} graphs: {sum(inserting) / len(inserting):.1f} of a step for each token.",
        "The artefact of `saap`, `kmeans` and `moments` had random weights, since speed does not depend on them.",
    )


def choosing(speed: Record, graph: Record, scaling: Record) -> str:
    """The paragraph on speed of the page on choosing."""
    quest, walked = timed(speed, "quest"), timed(graph, "retrieval:share=0.25")
    inserting = [one["append"]["share_of_step"] for one in walked.of.values()]
    first = next(one for one in scaling["sweeps"]["rows"]["points"] if one["selector"] == "quest")
    return text(
        f"At {speed['results'][0]['rows']:,} rows and a budget of {speed['budget']:,} a Quest step on two cores is "
        f"{quest.cells(BF16)[1]} times as fast as the fastest of torch's dense ways in bfloat16, and the bytes would "
        f"allow {quest.cells(BF16)[2]} ([speed](results/speed.md)). At {first['rows']:,} rows it is "
        f"{first['speed_up']['median']:.1f} times as fast. A `retrieval` step is {walked.cells(BF16)[1]} times as fast "
        f"as dense, but inserting the rows that decoding adds takes {sum(inserting) / len(inserting):.1f} of a step "
        "for each token. So it suits prompts that are asked often and answered in few tokens. Nothing has been timed "
        "on a GPU."
    )


def _building(graph: Record) -> tuple[list[float], list[float], list[float]]:
    """Seconds to build one graph, on the wall and of processor time, and to insert the rows of a seal into one."""
    ways = timed(graph, "retrieval:share=0.25").of.values()
    graphs = graph["heads"] * graph["group"]
    wall, processor = (
        sorted(one["prefill_seconds"]["index"][clock] / graphs for one in ways) for clock in ("wall", "processor")
    )
    return wall, processor, sorted(one["append"]["longest_pause_seconds"] / graphs for one in ways)


def building(graph: Record) -> str:
    """What `retrieval`'s index takes."""
    wall, processor, inserted = _building(graph)
    shape = graph["results"][0]
    return bullets(
        "The index takes 136 bytes for each key and query head (degree 32), and 1,056 for each of its 2,048 guides (D "
        f"= 64). With G = 4 that is about as much again as K and V in 16 bits at D = 128. Building takes {wall[0]:.0f} "
        f"to {wall[-1]:.0f} s on two cores ({sum(processor) / len(processor):.0f} of processor time) for a query head "
        f"at {shape['rows']:,} keys of D = {shape['size']} with a quarter of the queries. Decoding inserts rows at "
        f"every seal: {inserted[0]:.1f} to {inserted[-1]:.1f} s for {graph['seal']:,} rows and a query head."
    )


def scaling(record: Record) -> str:
    """How a step grows with the context."""
    points = [one for one in record["sweeps"]["rows"]["points"] if one["selector"] == "quest"]
    attend = [1e3 * one["seconds"]["attend"]["median"] for one in points]
    first, last = points[0], points[-1]
    return text(
        f"At a fixed budget attention hardly grows with the context: Quest's takes {min(attend):.1f} to "
        f"{max(attend):.1f} ms from {first['rows'] // 1024}k to {last['rows'] // 1024:,}k rows, here with "
        f"{first['heads']} KV heads. At {first['rows'] // 1024}k rows a Quest step is "
        f"{first['speed_up']['median']:.1f} times as fast as dense attention, at {last['rows'] // 1024:,}k "
        f"{last['speed_up']['median']:.0f} times."
    )


NAMED = {"static": "dense"}  # a way of a record -> what the table calls it
BESIDE = ("sdpa", "eager")  # transformers' own ways that are slower


def generate(record: Record) -> str:
    """Tokens a second, and how often dense attention's token was the likeliest."""
    lengths = record["lengths"]
    shape = record["shape"]
    model = f"`{record['model']}` ({shape['parameters'] / 1e6:.0f} M parameters, {shape['num_hidden_layers']} layers)"
    default = [f"{_found(one, 'sdpa')['tokens_per_second']:.0f}" for one in lengths]
    words = text(
        f"Decoding with {model} on {machine_of(record)}, torch {record['versions']['torch']}, {record['dtype']}, "
        f"budget {record['budget']}, sink {record['sink']}, window {record['window']}, seal {record['seal']:,}; every "
        f"way by turns behind one prefill, medians of {record['steps']} steps, without the time to build an index. "
        "Dense is the fastest of transformers' own ways, sdpa over a `StaticCache`; the `DynamicCache` that `generate` "
        f"takes by default decodes {' and '.join(default)} tokens a second. Equal is the share of the steps in which "
        "the likeliest token was dense's."
    )
    head = ["tokens/s"]
    for one in lengths:
        head += [f"{one['tokens']:,} tokens", "to dense", "equal"]
    names = [way["name"] for way in lengths[0]["ways"] if way["name"] not in BESIDE]
    lines = [
        [NAMED.get(name) or ticked(name), *(cell for one in lengths for cell in _cells(_found(one, name), name))]
        for name in names
    ]
    return parts(words, table(head, lines))


def _found(length: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    for way in length["ways"]:
        if way["name"] == name:
            return way
    raise LookupError(f"the record has no {name} at {length['tokens']} tokens")


def _cells(way: Mapping[str, Any], name: str) -> Iterator[str]:
    yield f"{way['tokens_per_second']:.0f}"
    yield "1" if name in NAMED else f"{way['speed_up']:.1f}"
    yield "" if name in NAMED else f"{100 * way['same_token_as_dense']:.0f} %"


def generate_notes(record: Record) -> str:
    """Where the time goes."""
    lengths = record["lengths"]
    quest = [_found(one, "quest") for one in lengths]
    spent = [100 * one["parts_seconds"]["model"] / sum(one["parts_seconds"].values()) for one in quest]
    walked = [_found(one, "retrieval:share=0.25") for one in lengths]
    inserting = " and ".join(f"{1e3 * one['sealing_seconds_per_token']['wall']:.0f}" for one in walked)
    built = " and ".join(f"{one['index_seconds']['wall']:.0f}" for one in walked)
    low, high = quest[0]["speed_up_range"]
    return bullets(
        "The oracle scores every key, so it is slower than dense.",
        f"Of a Quest step {' and '.join(f'{share:.0f}' for share in spent)} % is the model itself (with clocks around "
        "the parts): little is left to save on so small a model.",
        f"`retrieval` walks a graph per query head, and inserting sealed rows takes {inserting} ms of each token. Its "
        f"index took {built} s.",
        f"Ratios range by round (Quest {low:.1f} to {high:.1f} at {lengths[0]['tokens']:,} tokens). The second length "
        "is twice the positions that this model was made for.",
    )


def generate_parts(record: Record) -> str:
    """Where a step's milliseconds go, by length: the model itself and what sparse attention takes."""
    head = ["ms a token", "the model", "storing", "choosing", "attending", "other"]
    names = ("model", "store", "select", "attend", "other")
    lines = []
    for length in record["lengths"]:
        for way in length["ways"]:
            if way["parts_seconds"]:
                cells = [significant(1e3 * way["parts_seconds"][name]) for name in names]
                lines.append([f"{ticked(way['name'])}, {length['tokens']:,} tokens", *cells])
    return parts(text("With clocks around the parts, which slow a step:"), table(head, lines))


AIM = 1.8  # times as fast as the fastest dense way


def generate_limit(record: Record) -> str:
    """What a Quest step would need at the longest context to be `AIM` times as fast as dense."""
    one = record["lengths"][-1]
    quest = _found(one, "quest")
    dense = 1e3 * _found(one, one["dense"])["seconds_per_step"]["wall"]
    named = {name: 1e3 * seconds for name, seconds in quest["parts_seconds"].items()}
    model, sparse = named["model"], sum(seconds for name, seconds in named.items() if name != "model")
    left = dense / AIM - model
    needs = f"{left:.1f} ms may be left of the {sparse:.1f}" if left > 0 else "not even the model's part fits"
    return text(
        f"At {one['tokens']:,} tokens a dense step takes {dense:.0f} ms. Quest's takes {model:.0f} in the model and "
        f"{sparse:.1f} in storing, choosing, attending and the rest, over {record['shape']['num_hidden_layers']} "
        f"layers. For {AIM} times dense {needs}; attention for nothing would give {dense / model:.1f} times. So a "
        "model of this size at this length is bound by its own weights: what is left to gain is a faster model part, "
        "or longer contexts."
    )
