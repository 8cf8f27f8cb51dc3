"""What steps have in common: the methods that they compare, and the commands of those that differ by model or text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from scripts.evidence.step import Step
from sparseattn.recommend.candidates import METHODS

# What bench, agreement and questions compare; the bucket methods where an artefact ships, of SmolLM2.
TRAINED = "--selector saap --selector kmeans --selector moments"
COMPARED = (
    "--selector exact --selector exact:group=softmax --selector quest --selector quest:group=each "
    "--selector quest:page=8,int8=True --selector lowbit --selector twostage --selector retrieval --selector bridge"
)
JUDGED = "--selector exact --selector quest --selector quest:page=8,int8=True"
ASKED = "--selector exact --selector moments --selector saap --selector quest --selector quest:group=each"
CONTROLS = "--selector random --selector window"
# Keys of few bits beside what they are measured against.
FEW_BITS = (
    "--selector lowbit --selector lowbit:bits=1 --selector lowbit:page=16 --selector twostage "
    "--selector 'twostage:pages=[quest:int8=True],times=4' --selector fier --selector selfindex --selector pq"
)
# With every method as many rows wait for sealing and are read densely: a prefill leaves none behind groups of 64.
EQUAL = "--window 92 --seal 64"  # the last 32 of a multiple of 64 tokens are decoded
EQUAL_ASKED = "--window 123 --seal 64"  # the last 64, the first of which ends the prefill
# Every method and number of bits seals by the same number of rows, so that as many wait and are read densely.
ROUNDED = f"--selector quest --selector lowbit --selector 'quest:page=32' --kv-bits 16,8,4 {EQUAL}"
ROUNDED_ASKED = f"--selector quest --selector lowbit --kv-bits 16,8,4 {EQUAL_ASKED}"
BESIDE = "--selector exact:group=softmax --selector quest --selector quest:page=8,int8=True"
COMPARED_BITS = (
    f"{BESIDE} --selector quest:group=softmax {FEW_BITS} --selector lowbit:bits=4 --selector lowbit:rows=32,scales=8"
)
ERRORS = ("0.3%", "1%", "3%")  # of plans
UNSEEN = "--text workshop --text paradise-lost --text as-you-like-it"  # of kinds that no level was chosen on
VLLM = ".venv-vllm/bin/python"  # `make vllm` makes it; with nothing else to run
# The methods that the papers of SAAP, Quest and RetrievalAttention compare with.
HASHED = (
    "--selector random --selector kdeformer:rows=0 --selector reformer:rows=0 --selector magicpig "
    "--selector magicpig:bits=9,tables=120"
)
# What says how much its rows weigh, of each kind, every query head for itself.
ESTIMATES = (
    *("lowbit:bits=4,group=each", "lowbit:group=each", "lowbit:bits=1,group=each", "fier:group=each"),
    *("loki:group=each", "sparq:mean=False,group=each", "quest:group=each"),
)
MASSES = "mass:0.9,mass:0.95,mass:0.98"
TOPP = "--selector topp --selector topp:p=0.95 --selector topp:propose=1.0 --selector topp:inner=[lowbit:group=each]"
DROPPING = "--selector h2o --selector tova --selector snapkv"
WITHOUT_GRAPH = "--selector snapkv --selector infllm:page=16 --selector quest --selector magicpig --selector flat"
GRAPHS = "--selector retrieval:share=0.25 --selector robustvamana"
# With a row for what is not read, and without, at equal rows: 256 wait at once with every method.
EXACT = "exact:group=softmax"
TAILED = " ".join(
    f"--selector {inner} --selector '{tailed}'"
    for inner, tailed in (
        (
            "quest",
            "tailed' --selector 'tailed:rows=64' --selector 'tailed:rows=64,zone=0.25' --selector 'tailed:rows=256",
        ),
        ("lowbit", "tailed:inner=lowbit,rows=64' --selector 'tailed:inner=lowbit,rows=256"),
        (EXACT, f"tailed:inner=[{EXACT}],rows=64"),
    )
)
ESTIMATED = f"{TAILED} --selector 'tailed:inner=window,rows=64' --selector retroinfer --selector retroinfer:zone=1.0"
BY_HEAD = "--selector 'retrieval:share=0.25@sink=128,window=512,budget=100' --selector bridge:share=0.25"

# Scores of pages, those of few bits among them.
PAGE_SCORES = (
    "--selector quest --selector unique --selector mean --selector mean:bits=8 --selector quad --selector quad:bits=8 "
    "--selector quad:bits=4 --selector quad:rest=True --selector clse --selector clse:bits=8 "
    "--selector clse:bits=4,rest=True --selector clse:rank=4,bits=8 --selector clse:rank=8,bits=4 --selector ellipsoid "
    "--selector ellipsoid:bits=4 --selector ellipsoid:rank=2,deviations=1.0,rest=True "
    "--selector ellipsoid:rank=15,deviations=1.0 --selector lowbit:page=16 --selector pagemass "
    "--selector quest:page=8,int8=True --selector unique:page=8 --selector quad:page=8,bits=4 "
    "--selector clse:page=8,bits=4 --selector mean:page=4,bits=8 --selector lowbit:bits=1,page=16 "
    "--selector lowbit:page=8 --selector lowbit:bits=1,page=8"
)

# Methods without graphs whose step is timed: scores of pages, and what is made around others.
TIMED = (
    "--selector quest --selector quest:page=8,int8=True --selector unique --selector mean:page=4,bits=8 "
    "--selector quad:page=8,bits=4 --selector clse:page=8,bits=4 --selector ellipsoid:bits=4 --selector lowbit "
    "--selector lowbit:page=8 --selector lowbit:bits=1,page=8 --selector topp --selector tailed:inner=lowbit,rows=64 "
    "--selector retroinfer --selector rocketkv --selector quest:page=32@bits=8 --selector quest:page=32"
)

# Methods of 2025 and 2026 beside those that their papers compare with, and keys of few bits.
FRONTIER = (
    "--selector exact:group=softmax --selector quest --selector quest:group=softmax --selector sparq "
    "--selector pqcache --selector magicpig --selector lowbit --selector rocketkv --selector rocketkv:ratio=8 "
    "--selector rocketkv:ratio=4,prompt=2048 --selector pariskv --selector pariskv:group=softmax --selector random"
)


def short(model: str) -> str:
    """`gemma3` of `gemma3-270m`."""
    return model.partition("-")[0]


def captured(model: str, text: str, tokens: int, layers: str, queries: int = 32) -> str:
    """The command that captures a text's keys, and the queries of its last tokens, to a trace of the text's name."""
    return (
        f"sparseattn capture --model {model} --text {text} --tokens {tokens} --layers {layers} --queries {queries} "
        f"--dtype bfloat16 --out OUT/{text}.safetensors"
    )


def bench(trace: str, more: str, minutes: float) -> Step:
    """Every method on one trace, by layer and head."""
    return Step(
        f"bench-{trace}",
        f"every method on the trace {trace}, by layer and head, at equal rows and at equal bytes",
        f"sparseattn bench {trace} --by-layer {COMPARED} {more}{CONTROLS} --out OUT",
        minutes,
        "bench.jsonl",
    )


def few_bits(trace: str, more: str, minutes: float) -> Step:
    """Keys of few bits on one trace, beside the rows' true order and Quest."""
    return Step(
        f"lowbit-{trace}",
        f"keys of few bits on the trace {trace}, beside the rows' true order and Quest",
        f"sparseattn bench {trace} {COMPARED_BITS} {more}{EQUAL} --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def few_bits_text(model: str, text: str, tokens: int, layers: str, minutes: float) -> Step:
    """The same on a text of another kind than any built-in trace of the model."""
    return Step(
        f"lowbit-{text}",
        f"keys of few bits on {model}'s keys of the text {text}, beside the rows' true order and Quest",
        f"{captured(model, text, tokens, layers)} && sparseattn bench OUT/{text}.safetensors {COMPARED_BITS} "
        f"{EQUAL} --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def few_bits_agreement(model: str, length: int, more: str, minutes: float) -> Step:
    """How far predictions by keys of few bits are from full attention's."""
    return Step(
        f"agreement-{short(model)}-lowbit",
        f"agreement of {model}'s predictions with full attention's at {length:,} tokens, by keys of few bits",
        f"sparseattn eval --model {model} --dtype float32 --task agreement {UNSEEN} --lengths {length} --last 64 "
        f"--samples 2 {BESIDE} {FEW_BITS} {more}{CONTROLS} "
        "--budget 64,256 --out OUT",
        minutes,
        "eval.jsonl",
    )


def few_bits_equal(model: str, length: int, minutes: float) -> Step:
    """The same at equal rows, those that wait for sealing included."""
    return Step(
        f"agreement-{short(model)}-equal",
        f"agreement of {model}'s predictions with full attention's at {length:,} tokens, at equally many rows",
        f"sparseattn eval --model {model} --dtype float32 --task agreement {UNSEEN} --lengths {length} --last 64 "
        "--samples 2 --selector exact:group=softmax "
        "--selector quest --selector lowbit --selector lowbit:bits=1 --selector twostage --budget 256 "
        f"{EQUAL_ASKED} --out OUT",
        minutes,
        "eval.jsonl",
    )


def pages(model: str, text: str, tokens: int, layers: str, minutes: float) -> tuple[Step, Step]:
    """Scores of pages at equal rows, and how far they are from the pages' true mass."""
    first = captured(model, text, tokens, layers, 64)
    return (
        Step(
            f"pages-{short(model)}",
            f"scores of pages at equal rows, on {model}'s keys of the text {text}",
            f"{first} && sparseattn bench OUT/{text}.safetensors {PAGE_SCORES} --selector quest:group=softmax "
            f"--selector exact:group=softmax --budget 64,256,1024 {EQUAL} --by-layer --no-figures --out OUT",
            minutes,
            "bench.jsonl",
        ),
        Step(
            f"pages-loose-{short(model)}",
            f"how far scores of pages are from the pages' true mass, on {model}'s keys of the text {text}",
            f"{first} && python -m benchmarks.looseness OUT/{text}.safetensors {PAGE_SCORES} --results OUT",
            1.5,
            "looseness.json",
        ),
    )


def rounded(name: str, trace: str, minutes: float) -> Step:
    """Rows of 8 and 4 bits beside those that came, the choice of rows being the same."""
    return Step(
        f"rows8-{name}",
        f"rows of 8 and 4 bits on the trace {trace}",
        f"sparseattn bench {trace} {ROUNDED} --budget 64,256,1024 --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def rounded_agreement(model: str, length: int, minutes: float) -> Step:
    """How far predictions by rows of 8 and 4 bits are from full attention's."""
    return Step(
        f"agreement-{short(model)}-rows8",
        f"agreement of {model}'s predictions with full attention's at {length:,} tokens, by rows of 8 and 4 bits",
        f"sparseattn eval --model {model} --dtype float32 --task agreement --text workshop --text paradise-lost "
        f"--lengths {length} --last 64 --samples 2 {ROUNDED_ASKED} --budget 256,1024 --out OUT",
        minutes,
        "eval.jsonl",
    )


def inspect(trace: str, minutes: float) -> Step:
    """Why methods find or miss rows of a trace."""
    return Step(
        f"inspect-{trace}",
        f"distances, needed rows and Quest's bounds on the trace {trace}",
        f"sparseattn inspect {trace} --out OUT",
        minutes,
        "inspect.jsonl",
    )


def agreement(model: str, texts: str, length: int, windows: int, more: str, minutes: float) -> Step:
    """How far predictions are from full attention's, over windows of each text."""
    named = " ".join(f"--text {text}" for text in texts.split())
    return Step(
        f"agreement-{short(model)}-{length}",
        f"agreement of {model}'s predictions with full attention's at {length:,} tokens",
        f"sparseattn eval --model {model} --dtype float32 --task agreement {named} --lengths {length} --last 64 "
        f"--samples {windows} {JUDGED} {more}{CONTROLS} --budget 64,256,1024 --out OUT",
        minutes,
        "eval.jsonl",
    )


def recommended(model: str, length: int, windows: int, samples: int, more: str, minutes: float) -> Step:
    """Plans at three errors, judged on texts of other kinds beside each of their methods for all layers."""
    plans = [f"OUT/plan-{error}.json" for error in ERRORS]
    made = [
        f"sparseattn recommend --model {model} --dtype float32 --text workshop --text alice --length {length} "
        f"--windows {windows} {more}--error {error} --out OUT/recommend --plan {plan}"
        for error, plan in zip(ERRORS, plans, strict=True)
    ]
    judged = (
        f"sparseattn eval --model {model} --dtype float32 --task agreement --text paradise-lost --text as-you-like-it "
        f"--text click --lengths {length} --last 64 --samples {samples} {' '.join(f'--plan {plan}' for plan in plans)} "
        f"{' '.join(f'--selector {shlex.quote(method)}' for method in METHODS)} --budget 32,64,128,256,512,1024 "
        f"--no-figures --out OUT"
    )
    return Step(
        f"recommend-{short(model)}",
        f"plans for {model} at three errors beside the best method and budget for all layers, on texts no plan saw",
        " && ".join([*made, judged]),
        minutes,
        "eval.jsonl",
    )


def asked(model: str, tasks: str, lengths: str, methods: str, minutes: float, name: str = "") -> Step:
    """Prompts with known answers."""
    return Step(
        f"asked-{short(model)}{name}",
        f"prompts with known answers ({tasks.replace(',', ', ')}) to {model} at {lengths.replace(',', ' and ')} tokens",
        f"sparseattn eval --model {model} --dtype float32 --task {tasks} --lengths {lengths} "
        f"--depths 0.1,0.5,0.9 --samples 3 {methods} --budget 64,256 --out OUT",
        minutes,
        "eval.jsonl",
    )


def generate(model: str, tokens: str, more: str, minutes: float) -> Step:
    """Tokens a second."""
    return Step(
        f"generate-{short(model)}-cpu",
        f"tokens a second with {model} at {tokens.replace(',', ', ')} tokens",
        f"python -m benchmarks.generate --model {model} --dtype float32 --tokens {tokens} --selector quest "
        f"--selector quest:page=8,int8=True {more}--selector exact --selector window --results OUT",
        minutes,
        f"generate-{model}-float32-cpu.json",
    )


def hashed(model: str, text: str, layers: str, more: str, minutes: float) -> Step:
    """Methods that hash keys, against rows drawn evenly, as in SAAP's Figure 5."""
    return Step(
        f"rivals-hashed-{short(model)}",
        f"methods that hash keys against rows drawn evenly, on {model}'s keys of the text {text}",
        f"{captured(model, text, 8192, layers)} && sparseattn bench OUT/{text}.safetensors {HASHED} {more} "
        "--selector exact --budget 16,64,256,512,1024,2048 --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def tails(model: str, text: str, tokens: int, layers: str, more: str, minutes: float) -> Step:
    """Methods with a row for what they do not read, and without."""
    return Step(
        f"tails-{short(model)}",
        f"what a row for those not read wins at equal bytes, on {model}'s keys of the text {text}",
        f"{captured(model, text, tokens, layers)} && sparseattn bench OUT/{text}.safetensors {ESTIMATED} {more}"
        "--budget 64,256,1024,2048 --window 220 --seal 256 --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def reuse(model: str, tokens: int, layers: str, anchors: Sequence[int], minutes: float) -> Step:
    """Choices read again, over steps and over layers, where the map of layers was made from other texts."""
    kept = [f"freekv:tau={tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.5)]
    kept += ["freekv:tau=0.8,refresh=True", "freekv:inner=lowbit,tau=0.8"]
    file = "kascade:artefact=OUT/kascade.safetensors"
    kept += [*(f"{file},anchors={count}" for count in anchors), f"{file},anchors={anchors[-1]},inner=lowbit"]
    methods = " ".join(f"--selector {one}" for one in ("exact:group=softmax", "quest", "lowbit", *kept))
    taken = f"sparseattn capture --model {model} --layers {layers} --dtype bfloat16"
    return Step(
        f"reuse-{short(model)}",
        f"choices read again over steps and over layers, on {model}'s keys of the text paradise-lost",
        f"{taken} --text alice --text workshop --tokens 4096 --queries 128 --out OUT/prompts && "
        "sparseattn calibrate OUT/prompts --method kascade --out OUT/kascade.safetensors && "
        f"{taken} --text paradise-lost --tokens {tokens} --queries 64 --out OUT/paradise-lost.safetensors && "
        f"sparseattn bench OUT/paradise-lost.safetensors {methods} --budget 256,1024 --last 64 --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def dropping_agreement(model: str, length: int, minutes: float) -> Step:
    """How far predictions by methods that drop rows are from full attention's."""
    return Step(
        f"rivals-agreement-{short(model)}",
        f"agreement of {model}'s predictions with full attention's at {length:,} tokens, by methods that drop rows",
        f"sparseattn eval --model {model} --dtype float32 --task agreement --text workshop --text paradise-lost "
        f"--lengths {length} --last 64 --samples 2 {DROPPING} --selector recent --selector quest --selector exact "
        "--budget 64,256,1024 --out OUT",
        minutes,
        "eval.jsonl",
    )


def dropping_bare() -> Step:
    """H2O and TOVA as their papers have them, every row counted, at as many rows in all as beside the others."""
    return Step(
        "rivals-agreement-bare",
        "agreement of SmolLM2 by H2O and TOVA without a sink and a window beside theirs, at as many rows in all",
        "sparseattn eval --model smollm2 --dtype float32 --task agreement --text workshop --text paradise-lost "
        "--lengths 4096 --last 64 --samples 2 --selector h2o --selector tova --sink 0 --window 1 --seal 1 "
        "--budget 131,323,1091 --out OUT",
        5,
        "eval.jsonl",
    )


def dropping_asked(model: str, length: int, samples: int, minutes: float) -> Step:
    """Passkeys, asked for after the prefill and within it."""
    return Step(
        f"rivals-passkey-{short(model)}",
        f"passkeys in {length:,} tokens to {model}, asked for after the prefill or in it, by methods that drop rows",
        f"sparseattn eval --model {model} --dtype float32 --task passkey --lengths {length} --depths 0.1,0.5,0.9 "
        f"--samples {samples} --protocol question,prefill {DROPPING} --selector recent --selector quest "
        "--budget 64,256 --out OUT",
        minutes,
        "eval.jsonl",
    )


def frontier(model: str, text: str, tokens: int, layers: str, minutes: float) -> Step:
    """Methods of 2025 and 2026 on keys of a text."""
    return Step(
        f"frontier-{short(model)}",
        f"RocketKV and ParisKV on {model}'s keys of the text {text}, beside what their papers compare with",
        f"{captured(model, text, tokens, layers, 64)} && sparseattn bench OUT/{text}.safetensors {FRONTIER} "
        "--budget 64,256,1024 --rows 256 --bytes 10% --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def by_mass(model: str, text: str, other: str, layers: str, minutes: tuple[float, float, float, float]) -> list[Step]:
    """Budgets by mass on one text of a model: estimates as they are, and fitted on another text; top-p; vAttention."""
    own, others = (f"{captured(model, name, 8192, layers)} && " for name in (text, other))
    measured = f"sparseattn bench OUT/{text}.safetensors {EQUAL} --no-figures --out OUT"
    fits = "".join(
        f"sparseattn calibrate OUT/{other}.safetensors --method mass --selector {spec} --window 92 --out "
        f"OUT/{at}.safetensors && "
        for at, spec in enumerate(ESTIMATES)
    )
    fitted = " ".join(
        f"--selector 'sparseattn:Fitted:inner=[{spec}],artefact=OUT/{at}.safetensors'"
        for at, spec in enumerate(ESTIMATES)
    )
    every = " ".join(f"--selector {spec}" for spec in ("exact", "exact:group=softmax", *ESTIMATES))
    return [
        Step(
            f"mass-{short(model)}",
            f"mass promised and held on {model}'s keys of the text {text}, and rows beside the fewest",
            f"{own}{measured} {every} --budget {MASSES}",
            minutes[0],
            "bench.jsonl",
        ),
        Step(
            f"mass-calibrated-{short(model)}",
            f"the same with estimates fitted on the text {other}",
            f"{others}{fits}{own}{measured} {fitted} --budget {MASSES}",
            minutes[1],
            "bench.jsonl",
        ),
        Step(
            f"topp-{short(model)}",
            f"Twilight's top-p on {model}'s keys of the text {text}",
            f"{own}{measured} {TOPP} --budget all",
            minutes[2],
            "bench.jsonl",
        ),
        Step(
            f"vattention-{short(model)}",
            f"how often vAttention's denominator is off by more than epsilon, on {model}'s keys of the text {text}",
            f"{own}python -m benchmarks.guarantee OUT/{text}.safetensors --results OUT",
            minutes[3],
            "guarantee.json",
        ),
    ]
