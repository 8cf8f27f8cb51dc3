"""Each codec beside its paper's public code, written out here as that code has it; and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparseattn import ROW_CODECS, KVCache, LayerContext, RowCodec, decode, make_codec, make_selector
from sparseattn.codecs import kvquant
from sparseattn.codecs.base import NewRows
from sparseattn.codecs.table import CODECS
from tests import ROOT
from tests.cases import attention
from tests.codecs.cases import new_rows, read_all, stored


def rounded(x: Tensor, dim: int, bits: int) -> Tensor:
    """Numbers at `2^bits` even levels from the least to the largest along a dimension, as KIVI, GEAR and others have
    it (KIVI, quant/new_pack.py, quant_and_pack_kcache; GEAR, compress_function.py, fake_groupwise_...)."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return ((x - low) / step).round() * step + low


def close(mine: Tensor, theirs: Tensor, share: float) -> None:
    """Equal but for levels of 16 bits: the errors of one are those of the other, within a share."""
    assert float((mine - theirs).norm() / theirs.norm()) < share


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_rounds_as_its_code(bits: int) -> None:
    rows = new_rows(make_codec("kivi"))
    rows = NewRows(rows.keys.half(), rows.values.half(), rows.real)  # levels of float16, as KIVI's
    keys, values = read_all(stored(make_codec(f"kivi:bits={bits}"), rows))
    rows = NewRows(rows.keys.float(), rows.values.float(), rows.real)
    right = rounded(rows.keys.unflatten(2, (-1, 32)), 3, bits).flatten(2, 3)
    for mine, theirs in ((keys, right), (values, rounded(rows.values.unflatten(3, (-1, 32)), 4, bits).flatten(3))):
        other = (mine - theirs).abs() > 0.05 + theirs.abs() / 200  # a number half-way between two levels
        assert float(other.float().mean()) < 5e-3


def test_a_turn_spreads_an_outlier_channel() -> None:
    """RotateKV's reason: levels of a row with an outlier are coarse, those of the turned row are not."""
    rows = new_rows(make_codec("rotatekv"), size=64)
    kept = read_all(stored(make_codec("rotatekv:bits=4,clip=1.0"), rows))[0]
    plain = rounded(rows.keys, 3, 4)
    assert float((kept - rows.keys).norm()) < 0.7 * float((plain - rows.keys).norm())


def test_kvquant_learns_and_rounds_as_its_code() -> None:
    """simquant_module_quantizer.py: percentiles of channels, k-means without outliers, the nearest level (quantize,
    quant_fn_nuq_recon); 4 bits, so without Q-Norm."""
    codec = make_codec("kvquant:bits=4,share=0.05")
    rows = new_rows(codec, batch=1, rows=512)
    kept = stored(codec, rows)
    keys = rows.unroped.double().numpy()
    low, high = (np.percentile(keys, t, axis=2)[:, :, None] for t in (2.5, 97.5))
    units = (keys - (high + low) / 2) / ((high - low) / 2)
    apart = np.argsort(-np.abs(units), axis=3)[..., :2]
    assert np.mean(np.sort(apart) == np.sort(kept.part("key_at").numpy().astype(int))) > 0.99
    levels = kept.part("key_levels")[:, :, 0, 0].double().numpy()  # [B,H,K]
    assert np.all(np.diff(levels) > 0)
    choice = np.abs(units[..., None] - levels[:, :, None, None]).argmin(-1)
    inside = np.ones_like(units, bool)
    np.put_along_axis(inside, apart, False, 3)
    for h in range(2):  # a level is the mean of what is nearest to it: k-means has settled
        for k in range(16):
            mine = units[0, h][inside[0, h] & (choice[0, h] == k)]
            assert abs(mine.mean() - levels[0, h, k]) < 0.03
    found = np.take_along_axis(levels[:, :, None, None], choice[..., None], -1)[..., 0] * (high - low) / 2
    right = torch.from_numpy(np.where(inside, found + (high + low) / 2, keys)).float()
    close(read_all(kept)[0], rows.rope.rotate(right, rows.positions), 0.02)  # type: ignore[union-attr, arg-type]


def test_q_norm_sets_mean_and_deviation_right() -> None:
    codec = make_codec("kvquant:share=0.0,rope=False")
    rows = new_rows(codec, rows=512)
    keys = read_all(stored(codec, rows))[0]
    torch.testing.assert_close(keys[..., 8:].mean(2), rows.keys[..., 8:].mean(2), rtol=0, atol=0.15)
    ratio = keys[..., 8:].std() / rows.keys[..., 8:].std()
    assert abs(float(ratio) - 1) < 0.02


def test_gear_takes_the_best_of_low_rank_off_what_rounding_loses() -> None:
    """compress_function.py, gearslkivi_channelQ: without the ends, rounded, the rest by power iteration."""
    codec = make_codec("gear:group=64,rank=4")
    rows = new_rows(codec, rows=256)
    keys = read_all(stored(codec, rows))[0]
    grouped = rows.keys.unflatten(2, (-1, 64))
    ends = torch.cat([grouped.topk(1, 3).indices, grouped.topk(1, 3, largest=False).indices], 3)
    inner = grouped.scatter(3, ends, grouped.mean(3, keepdim=True).expand_as(ends))
    lost = (inner - rounded(inner, 3, 2)).flatten(2, 3)
    s = torch.linalg.svdvals(lost)
    best = s[..., 4:].square().sum(-1)  # [B,H]: what rank 4 must leave
    restored = keys.unflatten(2, (-1, 64)).gather(3, ends)
    close(restored, grouped.gather(3, ends), 0.004)  # the ends are there in 16 bits
    off = (keys.unflatten(2, (-1, 64)) - grouped).scatter(3, ends, 0.0).square().sum((2, 3, 4))
    assert bool((off < 1.15 * best).all())
    none = read_all(stored(make_codec("gear:group=64,rank=0"), rows))[0]
    assert float((keys - rows.keys).norm()) < 0.97 * float((none - rows.keys).norm())


def test_think_drops_the_channels_of_its_code() -> None:
    """kv_pruning_utils.py, key_pruner_query_driven: int(ratio * D) channels of the least products of mean squares."""
    codec = make_codec("think")
    rows = new_rows(codec)
    assert rows.queries is not None
    score = rows.queries.flatten(2, 3).pow(2).mean(2) * rows.keys.pow(2).mean(2)
    dropped = score.topk(int(32 * 0.4), largest=False).indices
    keys = read_all(stored(codec, rows))[0]
    zero = (keys == 0).all(2)  # [B,H,D]
    assert torch.equal(zero, torch.zeros_like(zero).scatter(2, dropped, True))


def test_ivfadc_codes_as_faiss_does_with_the_same_centroids() -> None:
    """faiss, IndexIVFPQ by residual: the same list and the same names of every row."""
    faiss = pytest.importorskip("faiss")
    codec: Any = make_codec("ivfadc:rope=False")
    rows = new_rows(codec, rows=512)
    kept = stored(codec, rows)
    for side, given, found in zip(("key", "value"), (rows.keys, rows.values), read_all(kept), strict=True):
        for b, h in ((0, 0), (1, 1)):
            flat = faiss.IndexFlatL2(32)
            flat.add(kept.part(f"{side}_centroids")[b, h, 0, 0].float().numpy())
            index = faiss.IndexIVFPQ(flat, 32, 16, 16, 4)
            faiss.copy_array_to_vector(kept.part(f"{side}_books")[b, h, 0].float().numpy().ravel(), index.pq.centroids)
            index.is_trained = True
            index.make_direct_map()
            index.add(given[b, h].numpy())
            equal = np.isclose(index.reconstruct_n(0, 512), found[b, h].numpy(), atol=1e-4).all(1)
            assert equal.all()


def test_ivfadc_keeps_more_of_rows_that_lie_in_groups() -> None:
    """Centroids of whole rows are what it has beside product codes: where rows lie about 16 points, little is left."""
    draw = torch.Generator().manual_seed(0)
    points = 10 * torch.randn(2, 2, 16, 32, generator=draw)
    which = torch.randint(16, (2, 2, 512), generator=draw)[..., None].expand(-1, -1, -1, 32)
    rows = new_rows(make_codec("kivi"), rows=512)
    near = NewRows(points.gather(2, which) + 0.1 * rows.keys, points.gather(2, which) + 0.1 * rows.values, rows.real)
    off = [(mine - near.values).norm() for mine in (
        read_all(stored(make_codec("ivfadc:rope=False"), near))[1],
        read_all(stored(make_codec("kivi"), near))[1],
    )]  # fmt: skip
    assert float(off[0]) < 0.5 * float(off[1])


def test_later_rows_lie_in_the_span_of_the_prompts_keys() -> None:
    codec = make_codec("lowrank:rank=8,rope=False")
    first, later = new_rows(codec), new_rows(codec, seed=1)
    keys = read_all(stored(codec, first, later))[0][:, :, 64:].double()
    leading = torch.linalg.svd(first.keys.double(), full_matrices=False).Vh[..., :8, :]
    close(keys, later.keys.double() @ leading.mT @ leading, 0.02)


def test_an_order_of_channels_helps_blocks_that_share_an_exponent() -> None:
    """K-sort: two large channels in every block of four spoil it, in one block they do not."""
    rows = new_rows(make_codec("bfp"), size=64)
    keys = rows.keys.clone()
    keys[..., ::8] *= 40
    rows = NewRows(keys, rows.values, rows.real)
    off = [
        float((read_all(stored(make_codec(f"bfp:block=8,sort={sort}"), rows))[0] - keys)[..., 1::8].norm())
        for sort in (True, False)
    ]
    assert off[0] < 0.9 * off[1] or off[0] < off[1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kivi:bits=3", "rows are of 2, 4 or 8 bits, got 3"),
        ("rotatekv:clip=0.0", "clip is a share of a row's reach, above 0 and to 1, got 0.0"),
        ("kvquant:bits=3", "bits of kvquant are 2 or 4, got 3"),
        ("kvquant:share=0.5", "share is of the numbers of a row, 0 to 0.1, got 0.5"),
        ("gear:group=12", "group is a power of two rows of keys that share levels, 8 to 256, got 12"),
        ("gear:rank=65", "rank is 0 to 64, got 65"),
        ("gear:outliers=5", "outliers are 0 to 4 numbers at either end, got 5"),
        ("think:ratio=1.0", "ratio is of the channels that are dropped, 0 to below 1, got 1.0"),
        ("lowrank:rank=0", "rank is 1 or more directions, got 0"),
        ("ivfadc:lists=64", "lists of ivfadc are 16 or 256, got 64"),
        ("ivfadc:bits=2", "bits of ivfadc are 4 or 8, got 2"),
        ("ivfadc:channels=0", "channels of a part are 1 or more, got 0"),
        ("bfp:bits=2", "bits of a mantissa are 4 or 8, got 2"),
        ("bfp:block=4", "block is 8 to 128 channels that share an exponent, got 4"),
        ("kivi:width=2", "kivi has no argument 'width'; it takes bits, group"),
        ("quest", "no row codec is called 'quest'; known are bfp, gear, ivfadc, kivi"),
        ("torch:Tensor", "'torch:Tensor' is not a subclass of sparseattn.RowCodec"),
    ],
)
def test_what_no_codec_takes_is_a_sentence(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make_codec(spec)


def test_a_cache_refuses_what_a_codec_cannot_keep() -> None:
    queries, keys, values = attention(2, 2, 3, 100, 36)
    for spec, words in (
        ("rotatekv:rope=False", "turns blocks of a power of two channels, 8 or more, which 36 is no multiple of"),
        ("lowrank:rank=40,rope=False", "takes heads of 40 channels and more, got 36"),
        ("kvquant", "keeps keys as they are before RoPE, and the selector was not told the layer's"),
    ):
        cache = KVCache("quest", rows=spec)
        with pytest.raises(ValueError, match=re.escape(words)):
            cache.append(keys, values, queries)
        assert cache.batch == 0, "nothing is stored then"
    with pytest.raises(
        ValueError, match=re.escape("think:ratio=0.4 learns from queries: append(keys, values, queries")
    ):
        KVCache("quest", rows="think").append(keys, values)
    with pytest.raises(ValueError, match="rows is a codec by name"):
        KVCache("quest", rows=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scores the cache's own keys, which are not kept with rows='gear'"):
        KVCache("exact", rows="gear")
    with pytest.raises(ValueError, match="leave fixed=True out"):
        KVCache("quest", rows="think", fixed=True, capacity=4096)


@pytest.mark.parametrize("impl", ["numba", "triton"])
def test_no_compiled_code_reads_what_torch_alone_reads(impl: str) -> None:
    queries, keys, values = attention(1, 2, 3, 200, 32)
    cache = KVCache("quest", rows="bfp", sink=0, window=4)
    cache.append(keys, values)
    cache.seal()
    kept = cache.stored.kept
    assert kept is not None
    query = queries[:, :, :, -1]
    with pytest.raises(RuntimeError, match=f'impl="{impl}" cannot run: rows of bfp are read by torch alone'):
        kept.codec.attend(query, kept, cache.select(query, 32), None, impl)


def test_queries_of_a_selector_and_of_a_codec_are_each_its_own() -> None:
    """A selector that wants more, fewer or none of the prompt's last queries is shown what it wants."""
    queries, keys, values = attention(1, 2, 3, 300, 32)
    for spec in ("snapkv:window=8", "snapkv:window=48", "lowbit"):
        found = []
        for rows in (None, "think:ratio=0.0"):
            selector = make_selector(spec).for_layer(LayerContext(0, 4))
            cache = KVCache(selector, sink=0, window=16, rows=rows)
            cache.append(keys, values, queries)
            found.append(decode(queries[:, :, :, -1], cache, 64))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0.05)


def test_the_table_and_the_page_have_every_codec() -> None:
    page = (ROOT / "docs" / "reference" / "codecs.md").read_text()
    assert list(ROW_CODECS) == sorted(CODECS)
    for name, row in CODECS.items():
        method: Any = ROW_CODECS[name]
        assert issubclass(method, RowCodec)
        assert str(method()) == name, "the defaults"
        line = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert (row.paper if "://" in row.paper else f"arxiv.org/abs/{row.paper}") in line
        assert f"| {row.read_by} |" in line


def test_kvquant_learns_from_every_channel_at_any_length() -> None:
    """Levels are learned from a sample, which must not take the same place of each row."""
    for row, rows in ((63, 16384), (62, 16500), (126, 2 * 16384), (64, 20)):
        places = kvquant._sample(row * rows)
        assert len(places) == min(row * rows, kvquant.SAMPLE)
        assert bool((places[1:] > places[:-1]).all())
        assert len((places % row).unique()) == row


def test_gear_holds_the_largest_numbers_of_16_bits() -> None:
    codec = make_codec("gear:group=32,bits=2")
    rows = new_rows(codec, 1, 1, 8192, 64)
    wide = [(10_000 * part).clamp(-65_000, 65_000).half() for part in (rows.keys, rows.values)]
    keys, values = read_all(stored(codec, dataclasses.replace(rows, keys=wide[0], values=wide[1])))
    for got, given in zip((keys, values), wide, strict=True):
        assert float((got - given.float()).norm() / given.float().norm()) < 0.5
