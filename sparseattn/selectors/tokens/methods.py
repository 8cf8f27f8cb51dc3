"""Methods that score single tokens, a row each: text alone, see `sparseattn.selectors.methods`."""

from __future__ import annotations

from sparseattn.selectors.method_row import MethodRow

METHODS = {
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
    "adamas": MethodRow(
        "tokens.adamas:Adamas",
        "2510.18413",
        reads="the tokens whose turned keys, in two bits per channel, lie nearest to the query",
        faithful="the Hadamard transform, four levels, the Manhattan distance, one choice per query head",
        departs="the threshold follows the prompt's keys, because the code's fits few models (`Adamas.paper()`); "
        "of tokens as far, the newest are read, which its code leaves open",
        scans="two bits per channel of every row",
        builds="the transform of each key",
        runs="torch, simulated",
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
        needs="nothing",
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
        needs="nothing",
        runs="torch, simulated",
    ),
    "querypq": MethodRow(
        "tokens.querypq:QueryPQ",
        "ours, over PQCache, 2407.12820, and A2ATS, 2502.12665",
        reads="the tokens whose product-quantised keys, in the metric of the queries, have the largest logits",
        faithful="product codes of keys, errors weighted by the queries' second moment",
        departs="keys after RoPE, less their mean before it, are turned and balanced over the parts, from a sample of "
        "this prompt, half of which gets the RoPE of positions to come",
        scans="half a bit per channel of every row, its position, what codes miss of 2 % of the rows, and the map of "
        "queries",
        builds="the queries' second moment, k-means, and each key's nearest centroids",
        needs="the prompt's queries, or a file; with `metric=keys` nothing",
    ),
    "a2ats": MethodRow(
        "tokens.a2ats:A2ATS",
        "2502.12665",
        reads="the tokens whose keys' centroids have the largest products with the query at a fixed distance",
        faithful="windowed RoPE, codes of keys before RoPE in the metric of the queries, one codebook of a file",
        departs="a query group votes for one list, where the authors' code reads the union of its heads' lists; "
        "without a file, this prompt's codebook of 256 centroids",
        scans="a byte or two of every row, and the codebook",
        builds="each key's nearest centroid; without a file k-means, too",
        needs="the model's RoPE; a file, or the prompt's queries",
        runs="torch",
    ),
    "hashattention": MethodRow(
        "tokens.hashattention:HashAttention",
        "2412.14468",
        reads="the tokens whose hash codes, made by networks, differ least from the query's",
        faithful="networks of three layers for keys and for queries, 32 bits, Hamming distances",
        departs="a code for each KV head and not for each query head; networks are fitted to the attention itself; "
        "without a file their weights are random",
        scans="a bit per output of every row, and the networks of queries",
        builds="the signs of each key's outputs",
        needs="a file, else random networks",
    ),
    "hata": MethodRow(
        "tokens.hata:Hata",
        "2506.02572",
        reads="the tokens whose learned hash codes differ least from the query's",
        faithful="one set of directions for queries and keys of a KV head, signs, Hamming distances summed in a group",
        departs="directions are fitted to the attention itself unless the paper's loss is asked for; without a file "
        "they are random",
        scans="a bit per direction of every row, and the directions",
        builds="the signs of each key's products",
        needs="a file, else random directions",
    ),
    "indexer": MethodRow(
        "tokens.indexer:Indexer",
        "ours, after DeepSeek Sparse Attention, 2512.02556",
        reads="the tokens with the largest products in few learned dimensions",
        faithful="a small index learned from the attention's own distribution",
        departs="fitted to a model as it is, linear, for each KV head; four bits a dimension; without a file its map "
        "is random",
        scans="half a byte per dimension of every row, and the maps of queries",
        builds="the image of each key",
        needs="a file, else a random map",
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
    "pillar": MethodRow(
        "tokens.pillar:Pillar",
        "SparseSpec, 2512.01278",
        reads="the tokens that the last pass of full attention gave the most weight",
        faithful="weights summed over a check's tokens and over the group, by a pass over the keys of its own",
        departs="the prompt's last queries choose first, where its code begins with the newest tokens; these are the "
        "window's and not the budget's",
        scans="nothing; every key once behind a check",
        builds="the weights that the prompt's last queries give",
        needs="the prompt's last queries, and checks of drafts (`generate_lossless`)",
    ),
}
