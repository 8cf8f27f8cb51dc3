"""What the processes of `test_tensor_parallel` do: a model whose heads they share, beside the whole one in each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sparseattn.models.drafts.shared_clock import groups_of
from sparseattn.models.errors import ModelError
from sparseattn.models.load import load_model
from sparseattn.models.lossless import generate_lossless
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.models.tensor_parallel import HeadShare
from sparseattn.roles.fingerprint import fingerprint
from sparseattn.roles.roles import Roles
from tests.models.tiny import generate, padded
from tests.ranks import main

SETTINGS: dict[str, Any] = {"sink": 2, "window": 4, "seal": None, "check": True}
ROLES = {0: ["dense", "quest:page=8"], 1: "lowbit:rows=16", 2: ["quest:page=4", "window"]}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"prefill_chunk_size": 16},
    "lookup": {"prompt_lookup_num_tokens": 4},
}


def compared(models: list[Any], given: dict[str, Any], way: str, new: int) -> dict[str, Any]:
    """Tokens and logits of the whole model, and of the shared one."""
    inputs = padded((60,)) if way == "lookup" else padded()
    said = []
    for model in models:
        with SparseCache(model, **given, budget=16, **SETTINGS) as cache:
            said.append((*generate(model, cache, inputs, max_new_tokens=new, **WAYS[way]), cache))
    (tokens, logits, one), (own, own_logits, shared) = said
    return {
        "tokens": bool(torch.equal(own, tokens)),
        "far": float((own_logits - logits).abs().max()),
        "heads": [part.rows.keys.shape[1] for part in shared.layers[0].parts],
        "steps": [cache.activity().total.sparse_steps for cache in (one, shared)],
    }


def drafted(models: list[Any], new: int) -> dict[str, Any]:
    """Tokens that the whole model generates losslessly, and the shared one; and its groups of processes."""
    inputs, said = padded(), []
    for model in models:
        with SparseCache(model, "quest:page=8", budget=16, **SETTINGS) as cache:
            mask = inputs["attention_mask"]
            out = generate_lossless(model, inputs["input_ids"], cache=cache, attention_mask=mask, max_new_tokens=new)
            said.append((out.sequences, len(groups_of(cache))))
    (tokens, one), (own, shared) = said
    return {"tokens": bool(torch.equal(own, tokens)), "groups": [one, shared]}


def refused(model: Any, given: dict[str, Any]) -> str:
    try:
        SparseCache(model, **given, budget=16, **SETTINGS)
    except (ValueError, ModelError) as error:
        return str(error)
    return "nothing"


def lives(names: dict[str, Any], size: int) -> Iterator[tuple[str, Any]]:
    whole, shared = (load_model(names["model"], torch.float64, "cpu", processes=count)[0] for count in (1, size))
    try:
        load_model(names["model"], processes=3)
    except ModelError as error:
        yield "refused three", str(error)
    for selector, way in names["generate"]:
        given = {"roles": Roles(ROLES)} if selector == "roles" else {"selector": selector}
        yield f"{selector} {way}", compared([whole, shared], given, way, names["new"])
    yield "drafts", drafted([whole, shared], names["new"])
    for selector in names["refused"]:
        yield f"refused {selector}", refused(shared, {"selector": selector})
    with SparseCache(shared, "quest") as cache:
        try:
            cache.load("nothing")
        except ValueError as error:
            yield "refused load", str(error)
        yield "here", [cache.here.rank, cache.here.size, HeadShare.of(whole, 2).size]
    yield "fingerprints", [fingerprint(model.named_parameters()) for model in (whole, shared)]


if __name__ == "__main__":
    from transformers import LlamaForCausalLM  # noqa: F401 -- imported once for both

    main(lives)
