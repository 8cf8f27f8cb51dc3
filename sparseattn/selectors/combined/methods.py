"""Methods made of others, a row each: text alone, see `sparseattn.selectors.methods`."""

from __future__ import annotations

from sparseattn.selectors.method_row import MethodRow

METHODS = {
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
    "indexcache": MethodRow(
        "combined.indexcache:IndexCache",
        "2603.12201",
        reads="in full layers, what another method chooses; in shared layers the same tokens",
        faithful="patterns of full and shared layers, the nearest full layer before, a greedy search by the model's "
        "loss (`training.shared_layers`)",
        departs="any method is shared, in a model that was not trained with an index; its training of one index for "
        "several layers is left out; its search is by its abstract and code of others",
        scans="every key in a full layer; nothing elsewhere",
        needs="the layers of a model",
    ),
    "lessismore": MethodRow(
        "combined.lessismore:LessIsMore",
        "2508.07101",
        reads="one list for all heads of a layer: what the heads rank first in turn, and the newest tokens",
        faithful="the union by ranks, a quarter of the budget for the newest tokens",
        departs="layers that choose read their own list; which layers choose, `kascade` says",
        scans="every key",
        runs="torch",
    ),
    "delta": MethodRow(
        "combined.delta:Delta",
        "2510.09883",
        reads="one list of pages for all heads of a layer, by the sums of their tokens' largest weights",
        faithful="the largest weight of any head, summed over a page; eight newest pages",
        departs="layers that choose read their own list; which layers choose, `kascade` says",
        scans="every key",
        runs="torch",
    ),
}
