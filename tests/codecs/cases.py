"""The one list of row codecs that every law of them runs over. A new codec adds a line here and inherits all laws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn import LayerContext, RowCodec, make_codec
from sparseattn.codecs.base import NewRows
from sparseattn.codecs.stored import StoredCodes
from sparseattn.core.rope import Rope
from tests.codecs import bounds

Bound = Callable[[RowCodec, NewRows, StoredCodes], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class CodecCase:
    """A codec, and how far what it reads back may be from what it was given.

    Args:
        spec: its text.
        bound: of a codec, rows and what is kept of them: the most that the squares of a row's errors may sum to, of
            keys and of values, `[B,H,n]` each.
    """

    spec: str
    bound: Bound

    def make(self) -> RowCodec:
        return make_codec(self.spec)


CODEC_CASES = [
    CodecCase("kivi:bits=8", bounds.half_steps),
    CodecCase("kivi:bits=2,group=16", bounds.half_steps),
    CodecCase("rotatekv", bounds.turned_half_steps),
    CodecCase("rotatekv:bits=4,clip=1.0,rope=False", bounds.turned_half_steps),
    CodecCase("kvquant", bounds.nearest_level),
    CodecCase("kvquant:bits=4,share=0.05,rope=False", bounds.nearest_level),
    CodecCase("gear:group=32", bounds.no_worse_than_rounded),
    CodecCase("gear:bits=4,group=16,rank=0,outliers=2", bounds.no_worse_than_rounded),
    CodecCase("think", bounds.dropped_channels),
    CodecCase("lowrank:rank=8", bounds.outside_the_span),
    CodecCase("lowrank:rank=12,rope=False", bounds.outside_the_span),
    CodecCase("bfp", bounds.last_places),
    CodecCase("bfp:bits=8,block=16", bounds.last_places),
    CodecCase("zipcache", bounds.half_steps_of_two_classes),
    CodecCase("ivfadc", bounds.nearest_words),
    CodecCase("ivfadc:channels=4,bits=8,rope=False", bounds.nearest_words),
    CodecCase("zipcache:high=8,low=4,share=0.2,score=sum", bounds.half_steps_of_two_classes),
]


def new_rows(codec: RowCodec, batch: int = 2, heads: int = 2, rows: int = 64, size: int = 32, seed: int = 0) -> NewRows:
    """Random rows with outlier channels, with all that the codec needs beside them."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, heads, rows, size, generator=draw)
    keys[..., 3] *= 10
    keys[..., 5] += 4
    queries = torch.randn(batch, heads, 3, codec.last_queries, size, generator=draw) if codec.last_queries else None
    at = torch.arange(7, 7 + rows, dtype=torch.int32).expand(batch, heads, rows)
    real = torch.ones(batch, heads, rows, dtype=torch.bool)
    weights = torch.rand(batch, heads, rows, generator=draw) if codec.wants_weights else None
    seen = torch.arange(rows, 0, -1).expand(batch, heads, rows) if codec.wants_weights else None
    return NewRows(keys, values, real, at, Rope.of(size) if codec.before_rope else None, queries, weights, seen)


def stored(codec: RowCodec, *seals: NewRows) -> StoredCodes:
    """What is kept of several seals."""
    made = StoredCodes(codec)
    made.rope = seals[0].rope
    for number, rows in enumerate(seals):  # queries come with the first alone
        mine = rows if not number else dataclasses.replace(rows, queries=None, weights=None, seen=None)
        made.store(mine, made.rows)
    return made


def read_all(kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """Keys and values `[B,H,N,D]` of all rows."""
    return kept.last(kept.rows, torch.float32)


def context(size: int) -> LayerContext:
    """Of a layer whose RoPE is known."""
    return dataclasses.replace(LayerContext(0, 4), rope=Rope.of(size))
