"""Methods that score pages, a row each: text alone, see `sparseattn.selectors.methods`."""

from __future__ import annotations

from sparseattn.selectors.method_row import MethodRow

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
    "infllm2": MethodRow(
        "pages.infllm2:InfLLM2",
        "2509.24663",
        reads="the blocks that the windows of mean keys with the largest shares of a softmax touch",
        faithful="windows of 32 rows every 16, shares summed over a group, the largest of a block of 64",
        departs="windows of sink and recent rows take no share; models that are not trained for the score",
        scans="a mean key of every 16 rows",
        builds="the mean key of every 16 rows",
        runs="torch",
    ),
    "shadowkv": MethodRow(
        "pages.shadowkv:ShadowKV",
        "2410.21465",
        reads="the chunks whose mean keys have the largest shares, and those whose keys differ most from their mean",
        faithful="chunks of 8, mean keys after RoPE, outliers by the smallest cosine, the largest share of a group",
        departs="outliers count in the budget; the answer's rows are chosen among; keys are not of low rank",
        scans="the mean and a cosine of every chunk",
        builds="the mean of each chunk, and its cosine with each of its keys",
        runs="torch",
    ),
    "seer": MethodRow(
        "pages.seer:Seer",
        "2506.08889",
        reads="the blocks whose pooled keys have the largest products with the query, by learned maps",
        faithful="keys before RoPE pooled by maximum, minimum and mean, one query of a group, RoPE of a block's start",
        departs="fitted to the sum of a block's attention, not its maximum; a budget, no threshold; without a file the "
        "maps are means",
        scans="one vector per block, and the map of queries",
        builds="the pooled keys of each block, and their map",
        needs="a file, else means; the layer's RoPE",
        runs="torch",
    ),
    "skipsoftmax": MethodRow(
        "pages.skipsoftmax:SkipSoftmax",
        "BLASST, 2512.12087",
        reads="the tiles whose largest logit is not far below the largest so far",
        faithful="tiles of 128, the running maximum, a threshold that falls with the context",
        departs="what is left is read as any selection, and a budget may cut it; we could read its abstract and "
        "documentation of engines alone",
        scans="every key",
        runs="torch",
    ),
}
