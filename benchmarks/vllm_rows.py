"""How close rows, pages and tails in vLLM are to full attention, beside a `SparseCache` of the same method.

``.venv-vllm/bin/python -m benchmarks.vllm_rows --artefact FILE --out FILE`` from the repository root; the file of codes
comes from ``sparseattn train --method querypq``. A text's tokens are forced on the engine one by one, so that every
method is asked for the same predictions; the prompt is dense in all of them.

Of Gemma 3 (``--model gemma3-270m --dense-layers 0``) the layers with a sliding window are stock's in both. An engine
counts dense layers among those of full attention, and a `SparseCache` among all.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import records
from sparseattn.cost_model.environment import machine, versions
from sparseattn.utils import children
from sparseattn.utils.devices import features

METHODS = (
    "querypq:artefact=FILE",
    "lowbit:bits=1",
    "lowbit:bits=1,page=16",
    "quest:page=32",
    "tailed:inner=[lowbit:bits=1],rows=64",
    "tailed:inner=[querypq:artefact=FILE],rows=64",
)
FILE = "artefact=FILE"  # in a method: the file of --artefact
ZONES: dict[str, Any] = {"sink": 64, "window": 64}
SEEN: list[Tensor] = []  # logits of the engine's steps


def compared(found: list[Tensor], full: list[Tensor]) -> dict[str, float]:
    """KL divergence and top-1 agreement of logits `[V]` with those of full attention, on average over steps."""
    logs, whole = (torch.stack(part).log_softmax(-1) for part in (found, full))
    kl = (whole.exp() * (whole - logs)).sum(-1)
    return {"kl": float(kl.mean()), "top": float((logs.argmax(-1) == whole.argmax(-1)).float().mean())}


def by_engine(
    folder: str, ids: list[int], last: int, methods: list[tuple[str, int]], zones: dict[str, Any]
) -> list[dict[str, Any]]:
    """What an engine's steps make of the last tokens, by each method and budget."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.update(children.environment({}))
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    from sparseattn.serving.vllm import cpu
    from sparseattn.serving.vllm.counters import stats
    from sparseattn.serving.vllm.settings import parse

    class Forced(AdapterLogitsProcessor):
        """Keeps a step's logits, and lets the given token follow."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            answer: Any = (params.extra_args or {}).get("answer")

            def force(output: list[int], logits: Tensor) -> Tensor:
                SEEN.append(logits.float().clone())
                return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([answer[len(output)]]), 0.0)

            return None if answer is None else force

    def settings(selector: str, budget: int) -> Any:
        return parse({**zones, "selector": selector, "budget": budget, "above": 256})

    llm = LLM(
        model=folder, dtype="float32", max_model_len=len(ids) + 8, kv_cache_memory_bytes=1 << 30, enforce_eager=True,
        additional_config={"sparseattn": settings(*methods[0]).to_dict()}, logits_processors=[Forced],
    )  # fmt: skip
    options = SamplingParams(
        temperature=0, max_tokens=last + 1, ignore_eos=True, extra_args={"answer": ids[len(ids) - last :] + ids[:1]}
    )

    def steps(chosen: Any) -> tuple[list[Tensor], Any]:
        cpu.switch(chosen)
        SEEN.clear()
        before = stats()
        llm.generate([{"prompt_token_ids": ids[: len(ids) - last]}], options, use_tqdm=False)
        return SEEN[-last:], stats() - before  # those before are of the prompt, one for each part of it

    full, _ = steps(None)
    found = []
    for selector, budget in methods:
        logits, ran = steps(settings(selector, budget))
        rows = ran.rows_read / ran.sparse_steps
        found.append({"by": "vLLM", "selector": selector, "budget": budget, "rows": rows, **compared(logits, full)})
        print(found[-1], flush=True)
    return found


def by_cache(
    folder: str, ids: list[int], last: int, methods: list[tuple[str, int]], zones: dict[str, Any]
) -> list[dict[str, Any]]:
    """The same by a `SparseCache` over transformers' model."""
    from transformers import AutoModelForCausalLM

    from sparseattn.models.prefill import Prefill

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = Prefill(model, torch.tensor([ids[: len(ids) - last]]), chunk=2048, queries=False)

    @torch.no_grad()
    def steps(selector: str, budget: int) -> tuple[list[Tensor], Any]:
        with prompt.cache(selector, budget, seal=64, **zones) as cache:
            answer = ids[len(ids) - last :]
            logits = [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in answer]
            return logits, cache.activity()

    full, _ = steps("exact", len(ids))
    found = []
    for selector, budget in methods:
        logits, ran = steps(selector, budget)
        rows = ran.rows_read / ran.sparse_steps
        same = compared(logits, full)
        found.append({"by": "SparseCache", "selector": selector, "budget": budget, "rows": rows, **same})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--artefact", type=Path, help=f"what {FILE} is in a method")
    parser.add_argument("--selector", action="append", help=f"again for several; by default {' '.join(METHODS)}")
    parser.add_argument("--dense-layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8000, help="of the text")
    parser.add_argument("--last", type=int, default=64, help="of which so many are decoded")
    parser.add_argument("--text", default="as-you-like-it")
    parser.add_argument("--budgets", default="128,256,512")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    selectors = given.selector or METHODS
    if given.artefact is None and (of_file := [one for one in selectors if FILE in one]):
        parser.error(f"{of_file[0]} needs --artefact")
    from transformers import AutoTokenizer

    from sparseattn.models.load import folder_of
    from sparseattn.traces.texts import read_named

    folder = str(folder_of(given.model))
    ids = AutoTokenizer.from_pretrained(folder).encode(read_named(given.text))[: given.tokens]
    named = {one.replace(FILE, f"artefact={given.artefact}"): one for one in selectors}
    asked = [(one, int(budget)) for one in named for budget in given.budgets.split(",")]
    zones = {**ZONES, "dense_layers": given.dense_layers}
    results = by_engine(folder, ids, given.last, asked, zones) + by_cache(folder, ids, given.last, asked, zones)
    for one in results:
        one["selector"] = named[one["selector"]]
    record = {
        "model": given.model, "dtype": "float32", "text": given.text, "tokens": len(ids), "last": given.last, **zones,
        "results": results, "machine": machine(), "features": features(),
        "threads": torch.get_num_threads(), "versions": versions(),
    }  # fmt: skip
    records.save(record, given.out)


if __name__ == "__main__":
    main()
