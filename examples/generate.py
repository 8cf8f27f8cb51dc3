"""Generate with a selector, beside full attention.

python examples/generate.py                      # asks the built-in reference model for a pass key
python examples/generate.py --selector window    # ... through the window alone, which does not hold the key
python examples/generate.py --model PATH_OR_HUB_ID --text FILE --selector quest:page=32 --budget 5% --dense-layers 2

Without a text the prompt hides a pass key in the middle of made-up sentences and asks for it, so that there is a right
answer. The context is prefilled densely; the question's tokens and the answer's are decoded sparsely, one by one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from sparseattn.core.budget import parse_budget
from sparseattn.evaluation.tasks.base import byte_count
from sparseattn.evaluation.tasks.registry import example
from sparseattn.models.load import encode, load_model
from sparseattn.models.sparse_cache import SparseCache

MODEL = "reference, smollm2, gemma3-270m, a folder, a GGUF file or a name on the Hugging Face hub"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help=MODEL)
    parser.add_argument("--text", type=Path, help="a prompt of yours; default: a question with an answer")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt, at most")
    parser.add_argument("--new", type=int, default=8, help="tokens to generate")
    parser.add_argument("--selector", default="lowbit")
    parser.add_argument("--budget", default="256", help='rows ("256"), a share ("5%%") or "all"')
    parser.add_argument("--dense-layers", type=int, default=0)
    given = parser.parse_args()

    model, tokenizer = load_model(given.model)
    model = model.float() if model.device.type == "cpu" else model
    ids, context = prompt(given.text, tokenizer, given.tokens)
    ids = ids.to(model.device)
    budget = parse_budget(given.budget)

    def generate(cache: SparseCache | None = None) -> str:
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": given.new, "do_sample": False}
        new = model.generate(input_ids=ids, cache=cache, **options)[0, ids.shape[1] :].tolist()
        return tokenizer.decode(new) if tokenizer else bytes(new).decode(errors="replace")

    print(f"dense: {generate()!r}")
    sparse = {"selector": given.selector, "budget": budget, "dense_layers": given.dense_layers, "sparse_from": context}
    with SparseCache(model, **sparse) as cache:
        print(f"{given.selector}, budget {given.budget}: {generate(cache)!r}")
        print(cache.stats())


def prompt(text: Path | None, tokenizer: object, tokens: int) -> tuple[Tensor, int | None]:
    """Token ids `[1,T]`, and how many of them are prefilled; None: all."""
    if text is not None:
        return encode(tokenizer, text.read_bytes())[:, :tokens], None

    def count(piece: str) -> int:
        return byte_count(piece) if tokenizer is None else encode(tokenizer, piece.encode()).shape[1]

    one = example("passkey", tokens, depth=0.5, count=count)
    print(f"right: {one.answers[0]!r}")
    whole = encode(tokenizer, (one.context + one.question).encode())
    return whole, encode(tokenizer, one.context.encode()).shape[1]


if __name__ == "__main__":
    main()
