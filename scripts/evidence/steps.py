"""The steps, in the order in which they run: the table that a reader sees whole."""

from __future__ import annotations

from scripts.evidence.step import Step

ASKED = "--selector exact --selector moments --selector saap --selector quest --selector quest:group=each"
CONTROLS = "--selector random --selector window"
BY_HEAD = "--selector 'retrieval:share=0.25@sink=128,window=512,budget=100' --selector bridge:share=0.25"

STEPS = (
    Step(
        "eval-reference-cpu",
        "passkey and key-value retrieval by the reference model",
        "sparseattn eval --lengths 4096 --depths 0,0.25,0.5,0.75,1 --samples 4 --seed 100 "
        f"{ASKED} {CONTROLS} --budget 16,64,256,1024 --out OUT",
        14,
        "eval.jsonl",
    ),
    Step(
        "speed-cpu",
        "one decode step of every method against dense attention",
        "python -m benchmarks.speed --rows 131072 --dtype bfloat16,float32 --selector quest "
        "--selector quest:page=8,int8=True --selector saap --selector kmeans --selector moments --selector exact "
        f"{CONTROLS} --rounds 15 --cycles 4 --results OUT",
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
        "generate-cpu",
        "tokens a second with the reference model at 16,384 and 32,768 tokens",
        "python -m benchmarks.generate --tokens 16384,32768 --selector quest --selector saap --selector moments "
        "--selector exact --selector window --selector retrieval:share=0.25 --results OUT",
        4,
        "generate-cpu.json",
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
    Step(
        "kernels",
        "what the Triton kernels compile to for three GPUs, without one",
        "python tests/test_kernel_compile.py 80 90 100",
        2,
        "output.txt",
    ),
)
