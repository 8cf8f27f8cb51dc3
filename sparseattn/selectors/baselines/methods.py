"""Methods that others are compared with, a row each: text alone, see `sparseattn.selectors.methods`."""

from __future__ import annotations

from sparseattn.selectors.method_row import MethodRow

METHODS = {
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
    "razor": MethodRow(
        "baselines.razor:RazorAttention",
        "2407.15891",
        reads="the newest tokens, and one row for all older ones",
        faithful="mean key, mean value, the logarithm of how many tokens they stand for",
        departs="rows are not freed; which heads retrieve is a matter of roles (`roles.papers.razor`)",
        builds="sums of keys and values",
        runs="torch",
    ),
    "random": MethodRow(
        "baselines.random:Random",
        "control of SAAP, 2502.08246",
        reads="tokens drawn uniformly",
        faithful="uniform draws",
        departs="none",
        runs="numba, torch on a GPU",
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
