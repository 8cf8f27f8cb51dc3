"""The papers' own arithmetic: the averages, ratios, bytes and costs that they print, each with the line it stands on.

A line is `S4:66`, line 66 of a paper's text: S0 a summary of Quest (arXiv 2406.10774), S1 Quest in Korean, S2 abstracts
of 53 papers, S3 SAAP (arXiv 2502.08246), S4 RetrievalAttention (arXiv 2409.10516). Where a printed number is not what
its own row or formula gives, both stand here. What is a law of a method, such as Quest's bound, is tested with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from sparseattn import KMeans, KVCache, Quest
from sparseattn.evaluation.step_measures import compare
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.parameters.saap_partition import Partition

GIB = 2**30


# -- Averages ----------------------------------------------------------------------------------------------------------

# Line | method | scores | average | its difference from full attention's. A score and an average may be two, with 640 +
# 100 and with 2,000 rows.
INFINITEBENCH = """
66 | Llama-3-8B full | 100.0 100.0 17.5 19.0 39.5 9.1 68.0 | 50.4 |
67 | StreamingLLM | 5.0 5.0 1.0 18.5 40.0 6.0 66.0 | 20.2 | -30.2
68 | SnapKV | 100.0 100.0 0.5 18.0 40.0 11.8 67.0 | 48.2 | -2.2
69 | InfLLM | 100.0 100.0 0.5 20.5 48.0 7.0 37.0 | 44.7 | -5.7
70 | InfiniGen | 99.5 100.0 0.0 17.5 39.0 7.3 57.5 | 45.8 | -4.6
71 | Quest | 100.0 100.0 0.0 18.0 40.0 8.2 67.0 | 47.6 | -2.8
72 | Flat | 100.0 100.0 8.5/14.5 19.0 40.0 7.5 67.0 | 48.9/49.7 | -1.5/-0.7
73 | IVF | 94.0 100.0 9.5/14.0 19.0 40.0 7.8 67.0 | 48.2/48.8 | -2.2/-1.6
74 | RetrievalAttention | 100.0 100.0 9.0/14.0 19.0 40.0 7.5 67.0 | 48.9/49.6 | -1.5/-0.8
75 | Yi-9B full | 100.0 100.0 30.5 25.5 36.5 9.8 67.0 | 52.8 |
76 | StreamingLLM | 5.0 5.0 0.5 24.0 33.5 6.4 72.0 | 20.9 | -31.9
77 | SnapKV | 63.0 100.0 0.5 23.0 33.0 10.3 68.5 | 42.6 | -10.2
78 | InfLLM | 100.0 100.0 0.5 20.5 43.0 9.4 44.0 | 45.3 | -7.5
79 | Quest | 99.0 100.0 0.0 22.5 34.5 10.4 68.5 | 47.8 | -5.0
80 | Flat | 100.0 100.0 21.0/30.0 23.0 35.0 10.8 68.5 | 51.2/52.5 | -1.6/-0.3
81 | IVF | 99.0 100.0 19.5/29.5 23.0 35.0 10.7 69.0 | 50.9/52.3 | -1.9/-0.5
82 | RetrievalAttention | 99.5 100.0 20.0/30.0 23.0 35.0 9.5 68.5 | 50.8/52.2 | -2.0/-0.6
83 | Yi-6B full | 98.0 100.0 3.5 31.0 11.0 19.2 55.5 | 45.5 |
84 | StreamingLLM | 5.0 5.0 0.5 27.5 11.0 12.2 54.0 | 16.5 | -29.0
85 | SnapKV | 39.0 100.0 0.0 30.5 8.5 17.1 55.0 | 35.7 | -9.8
86 | InfLLM | 99.0 100.0 0.5 27.5 18.0 12.7 40.5 | 42.6 | -2.9
87 | Quest | 98.5 100.0 0.0 30.5 8.5 17.3 54.5 | 44.2 | -1.3
88 | Flat | 98.5 100.0 2.5/3.0 30.5 16.0 17.7 54.5 | 45.7/45.7 | +0.2/+0.2
89 | IVF | 98.0 100.0 2.5/3.5 29.5 16.0 17.5 54.5 | 45.4/45.6 | -0.1/+0.1
90 | RetrievalAttention | 95.0 99.0 3.0/3.0 30.0 16.0 17.6 54.5 | 45.0/45.0 | -0.5/-0.5
"""
RULER = """
97 | Llama-3-8B full | 93.13 90.49 89.27 85.11 82.51 78.74 | 86.54 |
98 | StreamingLLM | 60.10 28.77 20.99 16.36 12.52 11.34 | 25.01 | -61.53
99 | SnapKV | 91.51 80.70 75.53 70.84 65.44 58.68 | 73.78 | -12.76
100 | InfLLM | 85.20 52.86 38.29 32.44 27.94 25.71 | 43.74 | -42.81
101 | Flat | 92.71 87.93 87.01 84.97 80.99 74.34 | 84.66 | -1.89
102 | IVF | 92.73 87.86 87.22 84.74 78.46 68.21 | 83.20 | -3.34
103 | RetrievalAttention | 92.64 88.46 86.80 84.78 80.50 74.70 | 84.70 | -1.85
104 | Yi-9B full | 91.02 86.62 82.85 73.17 67.08 60.51 | 76.87 |
105 | StreamingLLM | 57.53 28.30 19.08 13.48 12.53 12.81 | 23.95 | -52.92
106 | SnapKV | 90.39 75.59 64.48 48.70 39.28 32.97 | 58.57 | -18.30
107 | InfLLM | 82.66 50.36 36.17 28.20 22.65 20.94 | 40.16 | -36.71
108 | Flat | 91.09 87.71 84.42 74.58 66.16 59.50 | 77.24 | +0.37
109 | IVF | 91.03 91.04 83.85 72.19 65.13 58.04 | 76.29 | -0.58
110 | RetrievalAttention | 90.78 86.32 82.95 73.73 65.67 59.15 | 76.43 | -0.44
111 | Yi-6B full | 84.52 77.77 69.12 61.64 58.36 55.77 | 67.86 |
112 | StreamingLLM | 51.66 24.57 15.82 9.70 9.77 11.54 | 20.51 | -47.35
113 | SnapKV | 80.94 59.55 45.36 36.11 33.43 29.53 | 47.49 | -20.37
114 | InfLLM | 76.42 44.38 34.11 27.11 25.28 25.33 | 38.77 | -29.09
115 | Flat | 83.69 77.26 67.28 60.58 57.27 50.63 | 66.12 | -1.75
116 | IVF | 83.25 76.90 67.00 58.94 55.99 50.31 | 63.33 | -2.53
117 | RetrievalAttention | 83.01 76.56 67.49 59.46 57.20 51.44 | 65.86 | -2.00
"""
MORE = """
253 | full | 100.0 100.0 100.0 98.0 98.0 73.0 94.5 97.0 87.0 1.0 72.2 58.5 44.5 | 78.7 |
254 | InfiniGen | 99.0 91.5 24.5 82.5 25.0 0.0 30.3 27.8 67.3 1.2 45.5 33.0 32.5 | 43.1 |
255 | Quest | 100.0 100.0 98.5 98.5 36.5 0.0 48.9 64.3 89.4 1.0 64.5 45.0 39.5 | 60.5 |
256 | RetrievalAttention | 100.0 100.0 100.0 99.0 98.0 45.0 92.8 93.0 88.0 1.1 49.3 60.5 44.5 | 74.7 |
261 | full | 100.0 100.0 17.5 19.0 39.5 9.1 68.0 | 50.4 |
262 | RetrievalAttention | 100.0 100.0 14.5 18.5 40.0 8.7 67.5 | 49.9 |
263 | with PyramidKV | 100.0 100.0 16.0 18.5 40.0 8.5 67.5 | 50.1 |
"""
AVERAGES_MISPRINTED = {103: 84.65, 109: 76.88, 116: 65.40}  # line -> what its row gives
DIFFERENCES_MISPRINTED = {116: -4.53}  # -2.53 belongs to an average of 65.33, of which 63.33 is one digit off


@dataclass(frozen=True)
class Row:
    """A row of a table as printed; where it holds two of something, one of the two rows it is."""

    line: int
    method: str
    scores: list[float]
    average: str
    difference: str


def rows_of(table: str) -> list[Row]:
    found = []
    for text in table.strip().splitlines():
        line, method, scores, average, difference = (cell.strip() for cell in text.split("|"))
        for i, one in enumerate(average.split("/")):
            own = [float(score.split("/")[i if "/" in score else 0]) for score in scores.split()]
            found.append(Row(int(line), method, own, one, difference.split("/")[i] if difference else ""))
    return found


def digits(printed: str) -> int:
    return len(printed.partition(".")[2])


ROWS = [row for table in (INFINITEBENCH, RULER, MORE) for row in rows_of(table)]


@pytest.mark.parametrize("row", ROWS, ids=[f"S4:{row.line}-{row.method}-{row.average}" for row in ROWS])
def test_a_printed_average_is_that_of_its_row(row: Row) -> None:
    mean, rounding = sum(row.scores) / len(row.scores), 0.5 * 10 ** -digits(row.average)
    if row.line in AVERAGES_MISPRINTED:
        assert abs(mean - float(row.average)) > rounding, "the printed number is not the row's"
        assert mean == pytest.approx(AVERAGES_MISPRINTED[row.line], abs=rounding + 1e-9)
    else:
        assert mean == pytest.approx(float(row.average), abs=rounding + 1e-9)


@pytest.mark.parametrize("table", [INFINITEBENCH, RULER], ids=["InfiniteBench", "RULER"])
def test_a_printed_difference_is_from_full_attention(table: str) -> None:
    full = math.nan
    for row in rows_of(table):
        if not row.difference:
            full = float(row.average)
            continue
        found, printed = float(row.average) - full, float(row.difference)
        allowed = 1.01 * 10 ** -digits(row.difference)  # both averages are rounded
        if row.line in DIFFERENCES_MISPRINTED:
            assert abs(found - printed) > allowed
            assert found == pytest.approx(DIFFERENCES_MISPRINTED[row.line])
            assert full + printed == pytest.approx(65.33)
        else:
            assert found == pytest.approx(printed, abs=allowed), row


def test_saaps_table_swaps_two_columns_of_the_rows_that_it_copies() -> None:
    """S3:251-255, under Math.F and Code.D, hold what S4:66-74 has under Code.D and Math.F."""
    copied = {  # method -> line of S4, then Math.F, Code.D, En.QA and En.MC as S3 has them
        "full": (66, 19.0, 39.5, 9.1, 68.0),  # S3:251
        "StreamingLLM": (67, 18.5, 39.5, 5.9, 66.5),  # S3:252
        "SnapKV": (68, 18.0, 40.0, 11.8, 67.0),  # S3:253
        "InfLLM": (69, 20.5, 48.0, 7.0, 37.0),  # S3:254
        "RetrievalAttention": (74, 19.0, 40.0, 7.5, 67.0),  # S3:255
    }
    ours = {row.line: row.scores for row in rows_of(INFINITEBENCH)}
    for method, (line, math_f, code_d, *english) in copied.items():
        code, mathematics, *rest = ours[line][3:]
        off = 0.5 if method == "StreamingLLM" else 0.0  # of another version of the paper
        assert [math_f, code_d, *english] == pytest.approx([code, mathematics, *rest], abs=off)
        assert math_f < code_d, "while both papers' own rows, and S3:256, have Math.F above Code.D"
    reproduced = {"Math.F": 41.5, "Code.D": 24.5}  # S3:256
    assert abs(reproduced["Math.F"] - 39.5) < abs(reproduced["Math.F"] - 19.0)
    assert abs(reproduced["Code.D"] - 19.0) < abs(reproduced["Code.D"] - 39.5)


# -- Ratios ------------------------------------------------------------------------------------------------------------

PASSED = [  # where it is printed, what it is, from the numbers printed elsewhere in the paper, and as it is printed
    ("S4:23", "attention's share of the latency at 1M, S4:9-11", 1695 / 1765, "0.96"),
    ("S4:133", "search in Flat's token, S4:128", 0.798 / 0.922, "0.866"),
    ("S4:133", "search in IVF's token, S4:129", 0.250 / 0.373, "0.670"),
    ("S4:133", "search in RetrievalAttention's token, S4:130", 0.064 / 0.188, "0.340"),
    ("S4:133", "search saved against IVF, S4:129-130", 1 - 0.064 / 0.250, "0.74"),
    ("S4:209", "a token at 1M against one at 100K, S4:227", 0.172 / 0.159 - 1, "0.08"),
    ("S4:266", "a token of Flat against RetrievalAttention's, 70B, S4:269", 5.68 / 1.62, "3.5"),
    ("S4:266", "accuracy above Quest's, 70B, S4:268", 23.5 / 13.0 - 1, "0.8"),
    ("S1:36", "4,096 of 32K tokens, S1:36", 4096 / 32768, "0.125"),
    ("S1:58", "64 of 10k tokens, S1:43-49", 64 / 10_000, "0.01"),
    ("S1:58", "1,024 of 100k tokens, S1:50-56", 1024 / 100_000, "0.01"),
    ("S1:61", "Quest's 5K of NarrativeQA's 24K, S1:79", 5 / 24, "0.2"),
    ("S2:21", "CSKV: 20% of the channels, in 4 bits of 16", 1 - (1 - 0.80) * 4 / 16, "0.95"),
    ("S2:209", "Scissorhands: a fifth of the rows, in 4 bits of 16", 5 * 16 / 4, "20"),
]


@pytest.mark.parametrize(("where", "what", "found", "printed"), PASSED, ids=[f"{one[0]}-{one[3]}" for one in PASSED])
def test_a_printed_ratio_is_that_of_the_numbers_printed(where: str, what: str, found: float, printed: str) -> None:
    assert found == pytest.approx(float(printed), abs=0.5 * 10 ** -digits(printed) + 1e-9), what


FAILED = [  # the same, and what it should be by these numbers
    ("S4:133", "search saved against Flat, S4:128-130", 1 - 0.064 / 0.798, "0.91", "0.92"),
    ("S3:278", "SAAP's time saved, S3:276", 1 - 18 / 50, "0.65", "0.64"),
    ("S3:13", "the same in the abstract", 1 - 18 / 50, "0.60", "0.64"),
    ("S3:278", "work of full attention over SAAP's, of 4.4% of the keys, S3:275", 1 / 0.044, "20", "23"),
]


@pytest.mark.parametrize(
    ("where", "what", "found", "printed", "right"), FAILED, ids=[f"{one[0]}-{one[3]}" for one in FAILED]
)
def test_a_printed_ratio_that_is_not_that_of_the_numbers_printed(
    where: str, what: str, found: float, printed: str, right: str
) -> None:
    assert abs(found - float(printed)) > 0.5 * 10 ** -digits(printed), what
    assert found == pytest.approx(float(right), abs=0.5 * 10 ** -digits(right)), what


@pytest.mark.parametrize(
    ("where", "parts", "total"),
    [
        ("S4:9-11, 128K", (7.6, 25.2), 32.8),
        ("S4:9-11, 256K", (15, 96), 111),
        ("S4:9-11, 512K", (31, 434), 465),
        ("S4:9-11, 1M", (70, 1695), 1765),
        ("S4:128, and S4:124 at 128K", (0.798, 0.083, 0.041), 0.922),
        ("S4:129, and S4:125 at 128K", (0.250, 0.084, 0.039), 0.373),
        ("S4:130, and S4:126 at 128K", (0.064, 0.081, 0.043), 0.188),
    ],
)
def test_the_parts_of_a_printed_latency_make_its_total(where: str, parts: tuple[float, ...], total: float) -> None:
    assert sum(parts) == pytest.approx(total), where


def test_quests_speed_ups_fit_each_other() -> None:
    """Amdahl: 7.03 in attention (S1:73) makes 1.74 of a step (S1:76) if attention is half of it, "over 50%" (S1:5)."""

    def attention(of_a_step: float) -> float:
        return (1 - 1 / of_a_step) / (1 - 1 / 7.03)

    assert attention(1.74) == pytest.approx(0.496, abs=5e-4), "printed: over 50% (S1:5) and 53% (S1:21)"
    of_the_step = 1 / (1 - 0.53 * (1 - 1 / 7.03))
    assert of_the_step == pytest.approx(1.83, abs=5e-3), "53% would give more than 1.74"
    assert attention(2.23) == pytest.approx(0.643, abs=5e-4), "weights of 4 bits leave attention a larger share"


# -- Bytes of a cache --------------------------------------------------------------------------------------------------


def token_bytes(heads: int = 8, layers: int = 32) -> float:
    """Bytes of keys and values a token that a cache of ours holds; heads of size 128 in 16 bits, as in every paper."""
    cache = KVCache("window", capacity=16)
    cache.append(*torch.zeros(2, 1, heads, 16, 128, dtype=torch.bfloat16))
    return layers * cache.nbytes["kv"] / 16


@pytest.mark.parametrize(
    ("where", "heads", "layers", "tokens", "unit", "printed"),
    [
        ("S3:23, Llama 3 8B", 8, 32, 1, 2**10, "128"),
        ("S3:387, one KV head", 1, 1, 1, 1, "512"),
        ("S1:5 and S1:21, Llama 7B at 32K", 32, 32, 2**15, GIB, "16"),
        ("S4:13, Llama 3 8B at 128K, K being 1,000", 8, 32, 128_000, GIB, "15.6"),
        ("S4:13, at 256K", 8, 32, 256_000, GIB, "31.2"),
        ("S4:13, at 512K", 8, 32, 512_000, GIB, "62.5"),
        ("S4:13 and S4:5, at 1M, 1,024K", 8, 32, 1_024_000, GIB, "125"),
    ],
)
def test_a_cache_holds_what_the_papers_print(
    where: str, heads: int, layers: int, tokens: int, unit: int, printed: str
) -> None:
    held = token_bytes(heads, layers) * tokens / unit
    assert held == pytest.approx(float(printed), abs=0.5 * 10 ** -digits(printed) + 1e-9), where


def test_bytes_that_the_papers_leave_to_be_counted() -> None:
    llama3, llama1 = token_bytes(), token_bytes(32)
    assert llama3 * 1_000_000 / GIB < 123, "S4:5 prints 125 GB a million tokens, which are 1,024,000"
    assert llama3 * 640 == 80 * 2**20, "the 640 rows that S4:68 keeps on the GPU: its 16 GB (S2:109) are the weights"
    assert token_bytes(1, 1) < 4 * 200, "S3:387: MagicPIG's 200 tables take more than the row itself"
    duo = llama3 * 3.3e6  # S2:101: on one GPU of 80 GB by both of heads that stream and quantised rows
    assert duo * 4 / 16 > 80e9, "4 bits alone do not do"
    assert duo / 1.67 > 80e9, "nor do streaming heads"
    assert duo / 1.67 * 4 / 16 < 80e9
    two, three = (llama1 * 1e6 * bits / 16 for bits in (2, 3))  # S2:205: LLaMA 7B, a million tokens in 80 GB
    assert two < 80e9 < three
    assert 10 * two > 8 * 80e9, "S2:205: ten million on eight such GPUs fit only if 80 GB are GiB"
    assert 10 * two < 8 * 80 * GIB


# -- Quest's share of the bytes ----------------------------------------------------------------------------------------


def quest_share(tokens: int, budget: int, page: int = 16) -> float:
    """The share of the cache's bytes that our Quest reads, bounds included; no sink and no window.

    That it is 1/S + K/L, and 1/8 in the example of S0:145, is tested with Quest.
    """
    cache = KVCache(Quest(page), sink=0, window=0)
    cache.append(*torch.randn(2, 1, 1, tokens, 4))
    query = torch.randn(1, 1, 1, 4)
    return float(compare(query, cache, cache.select(query, budget), 1.0)["bytes_share"])


@pytest.mark.parametrize(
    ("where", "tokens", "budget", "share"),
    [
        ("S1:33 as it is written, 4K pages: all there are, and the bounds", 2**16, 2**16, 1 + 1 / 16),
        ("S1:36, about 1/8 of the tokens", 2**15, 4096, 3 / 16),
        ("S1:58, about 1% of the tokens", 10_000, 64, 0.0689),
        ("S1:58, about 1% of the tokens", 100_000, 1024, 0.0727),
    ],
)
def test_what_quest_reads_at_the_papers_budgets(where: str, tokens: int, budget: int, share: float) -> None:
    assert quest_share(tokens, budget) == pytest.approx(share, abs=5e-5), where


def test_quests_speed_up_is_below_what_its_bytes_allow() -> None:
    """S1:73: 7.03 times in attention, 2,048 of 32K tokens; S1:66: scoring alone costs 1/page of full attention."""
    most = 1 / quest_share(2**15, 2048)
    assert most == pytest.approx(8)
    assert 7.03 / most == pytest.approx(0.88, abs=5e-3)
    for page in (8, 16, 32):
        bounds = quest_share(2**12, page, page) - page / 2**12
        assert bounds == pytest.approx(1 / page)


# -- SAAP's selectivity ------------------------------------------------------------------------------------------------

BUCKETS = 1024  # S3:131
PROBES = (4, 8, 16, 32, 64, 128)  # S3:260; 0 there is the bare window, StreamingLLM (S3:235)
SELECTIVITY = {  # in percent, of 32 probes; NIH to 128k and to 500k, then the tasks
    "S3:247": (4.0, 5.3, 15.0, 13.8, 21.9, 47.8, 4.8, 3.7, 3.7),
    "S3:258": (25.8, 25.9, 19.1, 51.0, 4.8, 4.3, 4.3),
}


@pytest.fixture(scope="module")
def balanced() -> KVCache:
    """A cache whose keys fall evenly into 1,024 buckets: copies of the centroids."""
    centroids = torch.nn.functional.normalize(torch.randn(1, BUCKETS, 32), dim=-1)
    selector = KMeans(__file__)  # some file that is there
    selector._held = Artefact({0: Partition(centroids)}, roped=True)
    cache = KVCache(selector, sink=0, window=0)
    keys = centroids.repeat(1, 5, 1)[None]  # [1,1,5*C,D]
    cache.append(keys, keys)
    return cache


def balanced_share(cache: KVCache, probes: int) -> float:
    """Of the keys that `probes` buckets hold, as our bucket table selects them."""
    cache.selector.probes = probes
    selection = cache.select(torch.randn(1, 1, 4, 32), None)
    assert selection.scanned is not None
    assert int(selection.scanned) == BUCKETS
    return int(selection.attended) / cache.keys.shape[2]


def test_balanced_buckets_cost_what_the_paper_says(balanced: KVCache) -> None:
    """S3:125: l N / C products where all buckets are of one size."""
    for probes in PROBES:
        assert balanced_share(balanced, probes) == probes / BUCKETS


def test_the_papers_buckets_are_not_balanced(balanced: KVCache) -> None:
    share = 100 * balanced_share(balanced, 32)
    for where, printed in SELECTIVITY.items():
        assert min(printed) > share == 3.125, where
    assert max(SELECTIVITY["S3:247"]) > 15 * share, "S3:264: Math.F, lists of numbers"
    with_dense_layer = (31 * share + 100) / 32
    assert with_dense_layer > 6 > min(SELECTIVITY["S3:247"]), "layer 0, read whole (S3:148), is not in the means"
    dense = 100 * 2048 / 171_000  # S3:146, at S3:272's length
    assert share + dense == pytest.approx(4.3, abs=0.05), "S3:275 prints 4.4, dense rows perhaps among them"


# -- Rows that are always read -----------------------------------------------------------------------------------------


def test_static_rows_are_the_papers() -> None:
    pytest.importorskip("faiss")
    pytest.importorskip("numba")
    from sparseattn import RetrievalAttention

    retrieval, quest = RetrievalAttention.paper(), Quest.paper()
    assert (retrieval["sink"], retrieval["window"]) == (128, 512), "S3:284"
    assert retrieval["sink"] + retrieval["window"] == 640, "S4:72-74"
    assert (quest["selector"].page, quest["sink"]) == (16, 0), "S1:33, S1:72"
