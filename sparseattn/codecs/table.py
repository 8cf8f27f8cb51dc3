"""Every codec of this package, a row each: text alone, so that reading it imports no class and no torch."""

from __future__ import annotations

from typing import NamedTuple

BASE = "sparseattn.codecs."


class CodecRow(NamedTuple):
    """What there is to say of a codec in a phrase each; docs/reference/codecs.md describes it at length.

    Args:
        place: its class, `MODULE:CLASS` in `sparseattn.codecs`.
        paper: where it comes from, an arXiv number first.
        keeps: what is stored of a row.
        departs: what differs from the paper or its public code, and why.
        read_by: which code attends to its rows.
    """

    place: str
    paper: str
    keeps: str
    departs: str
    read_by: str = "torch"


CODECS = {
    "kivi": CodecRow(
        "kivi:Kivi",
        "2402.02750",
        keeps="codes of 2, 4 or 8 bits; levels of each key channel in a group of rows, of each 32 channels of a value",
        departs="levels are rounded outwards, so that they bound the keys; the cache's window and waiting rows take "
        "the place of the residual rows",
        read_by="numba, Triton, torch",
    ),
    "rotatekv": CodecRow(
        "rotatekv:RotateKV",
        "2501.16383",
        keeps="codes of 2, 4 or 8 bits of rows turned by a Hadamard matrix, keys before RoPE; two levels a row",
        departs="heads are turned one by one, so that an order of channels would change nothing; the cache's sink "
        "stands for the tokens of massive activations",
    ),
    "kvquant": CodecRow(
        "kvquant:KVQuant",
        "2401.18079",
        keeps="codes of 2 or 4 bits for learnt levels, keys before RoPE; 1 % of a row's numbers in 16 bits",
        departs="levels and reaches are learnt from the prompt, a head each, without Fisher information; every row has "
        "as many outliers; 3 bits are left out",
    ),
    "gear": CodecRow(
        "gear:Gear",
        "2403.05527",
        keeps="KIVI's codes; the ends of each key channel in a group and of each value; rank 4 of what rounding loses",
        departs="outliers are a number of a channel in each group and of each head's value, not a share of a prompt's; "
        "the rank is the same at every seal",
    ),
    "think": CodecRow(
        "think:ThinK",
        "2407.21018",
        keeps="60 % of the key channels in 16 bits; values in 16 bits",
        departs="the query heads of a KV head share the channels; the first seal chooses them for later rows too",
    ),
    "lowrank": CodecRow(
        "lowrank:LowRank",
        "2410.21465",
        keeps="products of the keys before RoPE with 32 singular vectors of the prompt's; values in 16 bits",
        departs="each head has vectors of its own, ShadowKV's are of all heads together; later rows are kept so too; "
        "values are not moved to host memory",
    ),
    "bfp": CodecRow(
        "bfp:BlockFloat",
        "2403.20137",
        keeps="mantissas of 4 or 8 bits, an exponent of 8 bits for each 32 channels; key channels in order of size",
        departs="the prompt's keys decide the order, not the projection's weights; values are kept so too",
    ),
    "zipcache": CodecRow(
        "zipcache:ZipCacheRows",
        "2405.14256",
        keeps="codes of 4 bits of the prompt's salient rows and of later ones, of 2 bits of the others",
        departs="the probes are the prompt's newest queries alone; levels of a value are a head's; later rows are all "
        "salient",
    ),
    "ivfadc": CodecRow(
        "ivfadc:IVFADC",
        "https://doi.org/10.1109/TPAMI.2010.57",
        keeps="of a key before RoPE, and a value, the nearest of 16 centroids, and 4 bits for 2 channels of the rest",
        departs="centroids are the prompt's, a head each; rows are read back, not summed from tables",
    ),
}
NAMES = {BASE + codec.place: name for name, codec in CODECS.items()}  # class -> name
