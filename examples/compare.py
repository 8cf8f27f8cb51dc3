"""Compare three selectors on your own text: what reading few rows costs in the loss of the text's last tokens.

python examples/compare.py                                      # the built-in reference model and text
python examples/compare.py --model PATH_OR_HUB_ID --text FILE --last 256 --budget 512

The text before the last tokens is prefilled once, densely. Each selector then sees the last tokens one by one, the
papers' protocol; "dense" is the model itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparseattn.core.budget import parse_budget
from sparseattn.evaluation.builtin_traces import text_bytes
from sparseattn.models.load import encode, load_model
from sparseattn.models.prefill import Prefill
from sparseattn.models.sparse_cache import SparseCache, restore

MODEL = "reference, smollm2, gemma3-270m, a folder, a GGUF file or a name on the Hugging Face hub"
SELECTORS = ("lowbit", "quest", "exact:group=softmax", "window")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help=MODEL)
    parser.add_argument("--text", type=Path, help="default: a text of 8,192 bytes that ships")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens of the text to keep")
    parser.add_argument("--last", type=int, default=64, help="tokens at its end to decode and to take the loss of")
    parser.add_argument("--budget", default="256", help='rows ("256"), a share ("5%%") or "all"')
    parser.add_argument("--selectors", nargs="+", default=SELECTORS)
    given = parser.parse_args()

    model, tokenizer = load_model(given.model)
    model = model.float() if model.device.type == "cpu" else model
    ids = encode(tokenizer, given.text.read_bytes() if given.text else text_bytes())[:, : given.tokens].to(model.device)
    context = ids.shape[1] - given.last
    budget = parse_budget(given.budget)

    prompt = Prefill(model, ids[:, :context], chunk=1024)
    dense = losses(model, prompt, ids, prompt.cache(dense_layers=model.config.num_hidden_layers))
    print(f"{context} tokens prefilled, {given.last} decoded; loss of the dense model {dense.mean():.4f}")
    for name in given.selectors:
        cache = prompt.cache(name, budget, seal=64, sparse_from=context)
        loss = losses(model, prompt, ids, cache)
        print(f"{name:24} loss {loss.mean():.4f} ({(loss - dense).mean():+.4f})  {cache.stats()}")
    restore(model)


def losses(model: torch.nn.Module, prompt: Prefill, ids: Tensor, cache: SparseCache) -> Tensor:
    """Return the loss of each token behind the prompt."""
    with torch.no_grad():
        logits = model(input_ids=ids[:, prompt.tokens : -1], cache=cache, use_cache=True).logits
    logits = torch.cat([prompt.logits[:, None], logits], 1)
    return cross_entropy(logits[0].float(), ids[0, prompt.tokens :], reduction="none")


if __name__ == "__main__":
    main()
