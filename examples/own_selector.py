"""Add your own selector: one class in one file, used beside the built-in ones.

python examples/own_selector.py                                 # generates with it
sparseattn bench --selector examples.own_selector:TopChannels:channels=8 --selector quest

The method here scores keys by few of their channels, those in which the query is largest, as the first step of SparQ
does (https://arxiv.org/abs/2312.04985). `sparq` is the whole method.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from sparseattn import Rows, Scan, Selection, Selector, StepContext
from sparseattn.evaluation.builtin_traces import text_bytes
from sparseattn.models.load import encode, reference_model
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.selectors.abilities import ReadsKeys
from sparseattn.selectors.base import best, vote


class TopChannels(ReadsKeys, Selector):
    """Reads the rows with the largest partial logits, over the channels where the query group is largest.

    Args:
        channels: of each key that are read to score it.
    """

    def __init__(self, channels: int = 16) -> None:
        self.channels = channels

    def append(self, rows: Rows) -> None:
        """Keep nothing: the keys themselves are the cache's (`stored_keys`)."""

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        keys = self.stored_keys()  # [B,H,N,D]
        largest = query.abs().sum(2).topk(min(self.channels, query.shape[3])).indices[:, :, None]  # [B,H,1,r]
        key_part = keys.gather(3, largest.expand(-1, -1, keys.shape[2], -1))  # [B,H,N,r]
        query_part = query.gather(3, largest.expand(-1, -1, query.shape[2], -1))  # [B,H,G,r]
        scores = (query_part @ key_part.mT).float() / self.temperature(query.shape[3])  # [B,H,G,N]
        scores = scores.masked_fill(~step.valid[:, None, None], -torch.inf)  # padding is never chosen
        return Selection.tokens(best(vote(scores, "softmax"), budget))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        return Scan(sealed, sealed * min(self.channels, query.shape[3]) * self.bytes_of(query))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    given = parser.parse_args()
    model = reference_model()
    ids = encode(None, text_bytes())[:, : given.tokens]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": given.new, "do_sample": False}
    expected = model.generate(input_ids=ids, **options)[0, given.tokens :]
    for selector in (TopChannels(32), TopChannels(8), "quest"):
        with SparseCache(model, selector, budget=256) as cache:
            new = model.generate(input_ids=ids, cache=cache, **options)[0, given.tokens :]
        agree = int((new == expected).cumprod(0).sum())
        print(f"{selector}: the first {agree} of {given.new} tokens are the dense model's. {cache.stats()}")


if __name__ == "__main__":
    main()
