"""Methods that hash keys, a row each: text alone, see `sparseattn.selectors.methods`."""

from __future__ import annotations

from sparseattn.selectors.method_row import MethodRow

METHODS = {
    "magicpig": MethodRow(
        "hashing.magicpig:MagicPIG",
        "2410.16179",
        reads="tokens sampled by colliding hashes, weighted by their probability",
        faithful="K signs in L tables, at least two collisions, logits less the logarithm of the probability",
        departs="the budget caps the sample; signatures are scanned, because lists of rows vary in length, so a step "
        "grows with the context",
        scans="every signature; in the paper, the rows that collide",
        builds="N products with K L directions",
        runs="torch, simulated",
    ),
    "kdeformer": MethodRow(
        "hashing.kdeformer:KDEformer",
        "2302.02451",
        reads="a bin of rows in the order of Gray-coded signs",
        faithful="order by Gray-coded signs, equal bins",
        departs="only the hash, for single queries, as in SAAP's Figure 5; neighbouring bins too",
        scans="a binary search per query head",
        builds="N products with each direction, and a sort",
        runs="torch",
        section="kdeformer-and-reformer",
    ),
    "reformer": MethodRow(
        "hashing.reformer:Reformer",
        "2001.04451",
        reads="the newest rows of the query's bucket, then the newest of all others",
        faithful="buckets by the nearest direction; the authors' decoding, or chunks of equal size (`rows=`)",
        departs="only the hash, one of them and of unchanged keys, for single queries, as in SAAP's Figure 5",
        scans="a binary search per query head",
        builds="N products with each direction, and a sort",
        runs="torch",
        section="kdeformer-and-reformer",
    ),
}
