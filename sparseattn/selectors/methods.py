"""Every method of this package, a row each: text alone, so that reading it imports no class and no torch.

`sparseattn.SELECTORS`, `sparseattn info` and the tables of the documents come from these rows. A method of a user has
no row and needs none.
"""

from __future__ import annotations

from typing import NamedTuple

BASE = "sparseattn.selectors."


class MethodRow(NamedTuple):
    """What there is to say of a method in a phrase each; docs/reference/methods.md describes it at length.

    Args:
        place: its class, `FAMILY.MODULE:CLASS` in `sparseattn.selectors`.
        paper: where it comes from: an arXiv number, an address, or words with one of these in them.
        reads: which tokens a query reads.
        faithful: what is as in the paper.
        departs: what differs from the paper, and why.
        scans: what choosing reads for a KV head at each step.
        builds: what it computes from the prompt.
        needs: what it must be given; nothing by default.
        runs: where tokens are chosen, see docs/reference/methods.md.
        section: the anchor of its section in docs/reference/methods.md, where that is not its name.
    """

    place: str
    paper: str
    reads: str
    faithful: str = ""
    departs: str = ""
    scans: str = "nothing"
    builds: str = "nothing"
    needs: str = "nothing"
    runs: str = "kernels"
    section: str = ""

    @property
    def family(self) -> str:
        """The folder of its class."""
        return self.place.partition(".")[0]

    @property
    def module(self) -> str:
        return BASE + self.place.partition(":")[0]

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.place.partition(":")[2]


METHODS = {
    "quest": MethodRow(
        "pages.quest:Quest",
        "2406.10774",
        reads="the pages whose key bounds promise the largest logit",
        faithful="pages of 16, bounds of the keys after RoPE, the score",
        departs="how the query heads of a group vote, which the paper leaves open",
        scans="the bounds of every page",
        builds="the smallest and the largest key of each page, per channel",
    ),
    "mean": MethodRow(
        "pages.mean:Mean",
        "in 2502.13189 and others",
        reads="the pages whose mean key has the largest product with the query",
        faithful="pages ranked by their mean key",
        departs="how the query heads of a group vote",
        scans="the mean of every page",
        builds="the mean key of each page",
        section="scores-of-pages",
    ),
    "unique": MethodRow(
        "pages.unique:Unique",
        "2605.27740",
        reads="the pages with the largest mean plus deviation, per channel",
        faithful="mean and deviation of a page, per channel",
        departs="the coefficient is 1 and a group sums its probabilities, because only the abstract could be read",
        scans="mean and deviation of every page",
        builds="mean and deviation of each page",
        section="scores-of-pages",
    ),
    "quad": MethodRow(
        "pages.quad:Quad",
        "amass-kv, https://pypi.org/project/amass-kv/",
        reads="the pages ranked by their mean and the variance along two principal directions",
        faithful="the score; the sum of a group's probabilities",
        departs="16 bits per number by default (its own are `bits=8` and `bits=4`); a direction is as long as its "
        "deviation, so no variances are stored; no content tag",
        scans="mean and directions of every page",
        builds="eigenvectors of each page's Gram matrix",
        section="scores-of-pages",
    ),
    "clse": MethodRow(
        "pages.clse:Clse",
        "amass-kv, https://pypi.org/project/amass-kv/",
        reads="the pages with the largest log-sum-exp of their rows along two principal directions",
        faithful="the score; the sum of a group's probabilities",
        departs="16 bits per number and no isotropic rest by default (`bits=4,rest=True` has both); no variances and "
        "no content tag, which are not needed here",
        scans="mean, directions and coordinates of every page",
        builds="eigenvectors of each page's Gram matrix",
        section="scores-of-pages",
    ),
    "ellipsoid": MethodRow(
        "pages.ellipsoid:Ellipsoid",
        "ours",
        reads="the pages with the largest logit on an ellipsoid about their mean, of four principal directions",
        scans="mean and directions of every page",
        builds="eigenvectors of each page's Gram matrix",
        section="scores-of-pages",
    ),
    "infllm": MethodRow(
        "pages.infllm:InfLLM",
        "2402.04617",
        reads="the blocks whose representative keys have the largest products with the query",
        faithful="four representative keys per block and query head; one choice per layer",
        departs="blocks are scored at their own positions, because attention reads them there; queries later than a "
        "seal do not count",
        scans="one vector per block and query head",
        builds="products of each key with the mean of the queries behind it",
        needs="the prompt's queries",
        runs="torch",
    ),
    "fier": MethodRow(
        "tokens.fier:Fier",
        "2508.08256",
        reads="the tokens whose 1-bit keys have the largest logits",
        faithful="one bit per channel, between the smallest and the largest number of 32 rows",
        departs="one choice per KV head, for comparisons at equal rows; 16-bit levels",
        scans="one bit per channel of every row, and the levels",
        builds="the smallest and the largest number of 32 rows, per channel",
    ),
    "lowbit": MethodRow(
        "tokens.lowbit:LowBit",
        "ours, over KIVI, 2402.02750",
        reads="the tokens whose keys, rounded to 1, 2 or 4 bits, have the largest logits",
        faithful="KIVI's groups per channel",
        departs="levels lie in the middle of equal parts, which lessens the error",
        scans="two bits per channel of every row, and the levels",
        builds="the smallest and the largest number of 64 rows, per channel",
    ),
    "selfindex": MethodRow(
        "tokens.selfindex:SelfIndex",
        "2603.14224",
        reads="the tokens whose sign patterns have the largest logits",
        faithful="signs of four channels, centroids of their patterns",
        departs="an index beside keys that are read unchanged, not a quantised cache; sink and window replace its "
        "full-precision rows",
        scans="a code for four channels of every row",
        builds="the median key, and the mean of each pattern",
        runs="torch, simulated",
    ),
    "pq": MethodRow(
        "tokens.pq:PQ",
        "product quantisation, https://doi.org/10.1109/TPAMI.2010.57",
        reads="the tokens whose product-quantised keys have the largest logits",
        faithful="an 8-bit code per subspace",
        departs="more bits, and k-means on a sample of this prompt",
        scans="a code per subspace of every row",
        builds="k-means, and each key's nearest centroids",
        needs="faiss",
        runs="torch, simulated",
    ),
    "pqcache": MethodRow(
        "tokens.pqcache:PQCache",
        "2407.12820",
        reads="the tokens whose keys, quantised to two 6-bit codes, have the largest logits",
        faithful="two codes of six bits, one choice per KV head",
        departs="25 rounds of k-means before the first decoded token, where its code runs 3 to 300 while the prompt is "
        "read; a byte per code; no cache of blocks, which does not affect the choice",
        scans="two codes of every row",
        builds="k-means, and each key's nearest centroids",
        needs="faiss",
        runs="torch, simulated",
    ),
    "querypq": MethodRow(
        "tokens.querypq:QueryPQ",
        "ours, over PQCache, 2407.12820, and A2ATS, 2502.12665",
        reads="the tokens whose product-quantised keys, in the metric of the queries, have the largest logits",
        faithful="product codes of keys, errors weighted by the queries' second moment",
        departs="keys after RoPE are turned and balanced over the parts, from a sample of this prompt alone",
        scans="half a bit per channel of every row, and the map of queries",
        builds="the queries' second moment, k-means, and each key's nearest centroids",
        needs="the prompt's queries, or a file; with `metric=keys` nothing",
    ),
    "sparq": MethodRow(
        "tokens.sparq:SparQ",
        "2312.04985",
        reads="the tokens with the largest logits over the channels in which the query is largest",
        faithful="the channels, the temperature, one choice per group",
        departs="the weight of the mean value, because tokens that are read keep their exact logits; sink and window "
        "come on top",
        scans="r of D channels of every row",
        builds="a copy of the keys, stored per channel",
        runs="torch, simulated",
    ),
    "rocketkv": MethodRow(
        "tokens.rocketkv:RocketKV",
        "2502.14051",
        reads="the tokens of small pages whose bounds over few channels promise the largest logits",
        faithful="bounds chosen by the sign of the summed query, its largest channels, SparQ's temperature",
        departs="the first stage, which drops rows of the prompt, is off by default, so that a second question can be "
        "served",
        scans="r of D channels of one bound of every page",
        builds="the smallest and the largest key of each page, per channel",
        needs="nothing; with `prompt=` the prompt's last queries",
        runs="torch, simulated",
    ),
    "pariskv": MethodRow(
        "tokens.pariskv:ParisKV",
        "2602.07721",
        reads="the tokens whose sign patterns collide most with the query's, re-ranked by 4-bit codes",
        faithful="the rotation, codes by signs, six tiers of collisions, 4-bit codes, the group's mean query",
        departs="levels of magnitudes are computed, not sampled; of tokens that tie, the newest are candidates, which "
        "its code leaves open",
        scans="a code for eight channels of every row, then the 4-bit codes of a tenth to a half",
        builds="the rotation of each key, its signs and levels",
        runs="torch, simulated",
    ),
    "doublesparsity": MethodRow(
        "tokens.doublesparsity:DoubleSparsity",
        "2408.07092",
        reads="the tokens with the largest products over channels calibrated beforehand",
        faithful="calibrated channels, 4-bit labels",
        departs="one list of channels per KV head, so that labels are stored once; without a file, the channels of "
        "this prompt",
        scans="the labels of every row",
        builds="nothing with a calibration; else a look at a tenth of the queries",
        needs="a calibration, or the prompt's queries",
        runs="torch, simulated",
    ),
    "loki": MethodRow(
        "tokens.loki:Loki",
        "2406.02542",
        reads="the tokens with the largest logits in few principal components of the keys",
        faithful="PCA of the keys, a quarter of the dimensions",
        departs="a copy beside the keys, because these stay unchanged; one size for all layers; without a file, this "
        "prompt's components",
        scans="a quarter of the dimensions of every row",
        builds="nothing with a calibration; else the keys' covariance",
        needs="a calibration, or nothing",
        runs="torch, simulated",
    ),
    "infinigen": MethodRow(
        "tokens.infinigen:InfiniGen",
        "2406.19707",
        reads="the tokens that a few skewed channels select for a query predicted one layer ahead",
        faithful="the predicted query, skewed partial products, rows within `alpha` of the best",
        departs="the skew comes from each prompt and belongs to a KV head, so that keys are stored once; its pool on "
        "the host is left out",
        scans="a fifth of the channels of every row",
        builds="singular vectors of the queries",
        needs="the prompt's queries, and each query predicted; a model in `SparseCache` has none",
        runs="torch, simulated",
    ),
    "kmeans": MethodRow(
        "clusters.kmeans:KMeans",
        "baseline of SAAP, 2502.08246",
        reads="the buckets with the nearest centroids",
        faithful="all tokens of the nearest buckets",
        departs="how the query heads of a group vote",
        scans="the centroids",
        builds="the nearest centroid of each key",
        needs="centroids of an artefact",
    ),
    "saap": MethodRow(
        "clusters.saap:SAAP",
        "2502.08246",
        reads="the buckets that a trained classifier picks",
        faithful="k-means buckets, a trained classifier, one probe per query group",
        departs="a linear path in the classifier, because prompts for training were few; a budget may cut the last "
        "bucket; `context=` is ours",
        scans="the classifier",
        builds="the nearest centroid of each key",
        needs="an artefact trained for the model",
    ),
    "moments": MethodRow(
        "clusters.moments:Moments",
        "ours, after SAAP, 2502.08246",
        reads="the buckets whose keys in this context promise the largest logits",
        faithful="SAAP's buckets",
        departs="ranked by mean and variance of this context's keys, so that no classifier is needed",
        scans="the moments of each bucket",
        builds="the nearest centroid of each key, mean and variance of each bucket",
        needs="centroids of an artefact",
    ),
    "retroinfer": MethodRow(
        "clusters.retroinfer:RetroInfer",
        "2505.02922",
        reads="clusters of this prompt's keys; the next clusters are approximated by their means",
        faithful="spherical k-means in segments of 8,192 keys less their mean, 16 keys per cluster, a share `zone` of "
        "the clusters estimated",
        departs="a budget of rows and not of clusters, as for all methods; sizes count when clusters to estimate are "
        "chosen; no buffer between GPU and CPU, which affects only speed",
        scans="the centroid of each cluster",
        builds="10 rounds of k-means in each segment",
        runs="torch",
    ),
    "retrieval": MethodRow(
        "graphs.retrieval:RetrievalAttention",
        "2409.10516",
        reads="what a search finds in a graph built with the prompt's queries",
        faithful="a graph per query head, guided by exact neighbours of the prefill's queries",
        departs="four pivots, merged lists, sizes that the paper does not give, `metric=query`",
        scans="a search per query head",
        builds="neighbours, projection, pruning, enhancement",
        needs="the prompt's queries",
        runs="numba",
    ),
    "robustvamana": MethodRow(
        "graphs.robustvamana:RobustVamana",
        "OOD-DiskANN, 2211.12850",
        reads="what a search finds in a graph of neighbouring keys, stitched by queries",
        faithful="two passes, stitching by queries",
        departs="a graph per query head, since queries differ; keys are inserted in batches",
        scans="a search per query head",
        builds="a search and pruning for each key, twice",
        needs="a hundredth of the prompt's queries",
        runs="numba",
    ),
    "bridge": MethodRow(
        "graphs.bridge:QueryBridge",
        "ours, after RetrievalAttention, 2409.10516",
        reads="keys that similar earlier queries retrieved",
        faithful="lists of the keys that the prefill's queries retrieved",
        departs="no graph: shapes stay static, so a GPU never waits for the host",
        scans="the guides, then their lists",
        builds="exact neighbours of sampled queries",
        needs="the prompt's queries",
    ),
    "flat": MethodRow(
        "graphs.faiss_indexes:Flat",
        "faiss, in 2409.10516",
        reads="what faiss finds among all keys",
        faithful="the index itself",
        departs="none",
        scans="every key, per query head",
        needs="faiss",
        runs="faiss",
        section="flat-ivf-hnsw",
    ),
    "ivf": MethodRow(
        "graphs.faiss_indexes:IVF",
        "faiss, in 2409.10516",
        reads="what faiss finds in the nearest lists",
        faithful="lists by k-means of this prompt's keys",
        departs="none",
        scans="the centroids, then every key of a few lists",
        builds="k-means",
        needs="faiss",
        runs="faiss",
        section="flat-ivf-hnsw",
    ),
    "hnsw": MethodRow(
        "graphs.faiss_indexes:HNSW",
        "1603.09320, in 2409.10516",
        reads="what faiss finds in a hierarchical graph",
        faithful="faiss's index by inner product",
        departs="none; `metric=l2` is a stronger baseline than the paper's",
        scans="a search per query head",
        builds="insertion of every key",
        needs="faiss",
        runs="faiss",
        section="flat-ivf-hnsw",
    ),
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
    "h2o": MethodRow(
        "eviction.h2o:H2O",
        "2306.14048",
        reads="the tokens with the most attention so far, and the newest; others are dropped",
        faithful="accumulated weights; half of the budget for the newest tokens",
        departs="one choice per KV head; weights that a token gets in the cache's window are not seen, except with "
        "`H2O.paper()`",
        scans="4 bytes per row kept",
        builds="all of the prompt's attention once more, in blocks",
        needs="the prompt's queries, the weights of each step",
        runs="torch",
    ),
    "tova": MethodRow(
        "eviction.tova:TOVA",
        "2401.06104",
        reads="the tokens with the most attention from the newest query; others are dropped",
        faithful="drops the token with the least weight, averaged over heads",
        departs="none with `TOVA.paper()`; else sink and window come on top",
        scans="4 bytes per row kept",
        builds="products of the last query with every key",
        needs="the prompt's last query, the weights of each step",
        runs="torch",
    ),
    "snapkv": MethodRow(
        "eviction.snapkv:SnapKV",
        "2404.14469",
        reads="the prompt's tokens that its last queries vote for; others are dropped",
        faithful="pooled votes of the prompt's last 32 queries",
        departs="one choice per KV head, where the authors' code has one per query head; tokens sealed later count",
        scans="4 bytes per row kept",
        builds="products of the last queries with every key",
        needs="the prompt's last queries",
        runs="torch",
    ),
    "pyramidkv": MethodRow(
        "eviction.pyramidkv:PyramidKV",
        "2406.02069",
        reads="like `snapkv`, with fewer tokens in higher layers",
        faithful="`snapkv` with budgets that fall over layers",
        departs="the budget is that of layer 0 and not the mean, because a budget is a limit here",
        scans="4 bytes per row kept",
        builds="products of the last queries with every key",
        needs="the number of layers, the prompt's last queries",
        runs="torch",
    ),
    "twostage": MethodRow(
        "combined.twostage:TwoStage",
        "ours",
        reads="of the tokens that another method proposes, those that `lowbit`'s codes rank first",
        scans="what the first stage reads (`quest`), then two bits per channel of the tokens proposed",
        builds="both indexes",
    ),
    "topp": MethodRow(
        "combined.topp:TopP",
        "Twilight, 2502.02770",
        reads="of the tokens that another method proposes, the fewest that hold a share p of their weight",
        faithful="4-bit keys, a choice for each query head",
        departs="levels per channel and not per row, which find more; p is a share of the tokens proposed, with sink "
        "and window beside it",
        scans="what the first stage reads (`quest`), then four bits per channel of the tokens proposed",
        builds="both indexes",
    ),
    "vattention": MethodRow(
        "combined.vattention:VAttention",
        "2510.05688",
        reads="tokens that another method chooses, and a sample of the others as large as an error bound needs",
        faithful="the top tokens exactly, a sample by the error of the denominator, biases of the sample",
        departs="z of delta / 2 and a margin, because the bound is missed otherwise; draws shared by a KV head; the "
        "budget caps the sample; no bound of the numerator",
        scans="what `inner` reads (`exact`), then the key of each token of the base sample",
        builds="what `inner` builds",
        runs="torch",
    ),
    "tailed": MethodRow(
        "combined.tailed:Tailed",
        "estimation zone of 2505.02922 and 2602.05191, for any method",
        reads="what another method reads, and one mean row for the rest of each group",
        faithful="mean key, mean value, the logarithm of how many tokens they stand for",
        departs="groups are the inner method's pages or buckets; a mean is of all rows of its group, which had the "
        "smaller error; Double-P's two thresholds are left out",
        scans="what `inner` reads (`quest`); the means count as attended",
        builds="what `inner` builds, and the mean of each group",
        needs="what `inner` needs",
        runs="as `inner`",
    ),
    "freekv": MethodRow(
        "combined.freekv:FreeKV",
        "2505.13109",
        reads="the previous choice, for each KV head whose queries have stayed similar; otherwise a new one",
        faithful="a choice is reused while the mean cosine of a group's queries is at least `tau`",
        departs="a query is compared with the one that the choice was made for, which saves scanning; the paper makes "
        "the next step's choice at every step (`refresh=True`), which saves waiting",
        scans="nothing where a choice is reused, else what `inner` reads (`quest`)",
        builds="what `inner` builds",
        runs="as `inner`; the host waits",
    ),
    "kascade": MethodRow(
        "combined.kascade:Kascade",
        "2512.16391",
        reads="in anchor layers, what another method chooses; in later layers the same rows, through a map of heads",
        faithful="anchors by the paper's dynamic programme, the sum of a group's probabilities, the map of heads",
        departs="anchors read their own choice, layer 0 too; layers count equally, because traces do not hold hidden "
        "states; the prefill is dense",
        scans="every key in an anchor; nothing elsewhere",
        needs="a calibration, or anchors by number; the layers of a model",
    ),
    "exact": MethodRow(
        "baselines.exact:Exact",
        "none: the oracle",
        reads="the tokens with the largest logits",
        scans="every key",
    ),
    "pagemass": MethodRow(
        "baselines.pagemass:PageMass",
        "none: the oracle of page scores",
        reads="the pages with the most attention",
        scans="every key",
        runs="torch",
        section="scores-of-pages",
    ),
    "recent": MethodRow(
        "baselines.recent:Recent",
        "StreamingLLM, 2309.17453, at equal rows",
        reads="the newest tokens",
        faithful="sink and newest tokens",
        departs="keys keep their positions, because they carry RoPE already; whole pages",
        runs="torch",
        section="window-and-random",
    ),
    "random": MethodRow(
        "baselines.random:Random",
        "control of SAAP, 2502.08246",
        reads="tokens drawn uniformly",
        faithful="uniform draws",
        departs="none",
        runs="torch",
        section="window-and-random",
    ),
    "window": MethodRow(
        "baselines.window:Window",
        "StreamingLLM, 2309.17453",
        reads="sink and window alone",
        faithful="sink and newest tokens",
        departs="keys keep their positions, because they carry RoPE already",
        runs="nothing to choose",
        section="window-and-random",
    ),
}
NAMES = {BASE + method.place: name for name, method in METHODS.items()}  # class -> name
