"""Generate with a selector.

python examples/generate.py                                     # the built-in reference model and text
python examples/generate.py --model PATH_OR_HUB_ID --text FILE --selector quest:page=32 --budget 5% --dense-layers 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sparseattn.budget import parse_budget
from sparseattn.builtin import text_bytes
from sparseattn.integrations.models import encode, load_model, reference_folder
from sparseattn.integrations.transformers import SparseCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=reference_folder(), help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--text", type=Path, help="the prompt; default: a text of 8,192 bytes that ships")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens of the prompt to keep")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--selector", default="quest")
    parser.add_argument("--budget", default="256", help='rows ("256"), a share ("5%%") or "all"')
    parser.add_argument("--dense-layers", type=int, default=0)
    given = parser.parse_args()

    model, tokenizer = load_model(given.model)
    model = model.float() if model.device.type == "cpu" else model
    ids = encode(tokenizer, given.text.read_bytes() if given.text else text_bytes())[:, : given.tokens].to(model.device)

    budget = parse_budget(given.budget)
    with SparseCache(model, selector=given.selector, budget=budget, dense_layers=given.dense_layers) as cache:
        out = model.generate(
            input_ids=ids,
            attention_mask=ids.new_ones(ids.shape),
            past_key_values=cache,
            max_new_tokens=given.new,
            do_sample=False,
        )
    new = out[0, ids.shape[1] :].tolist()
    print(tokenizer.decode(new) if tokenizer else bytes(new).decode(errors="replace"))
    print(cache.stats())


if __name__ == "__main__":
    main()
