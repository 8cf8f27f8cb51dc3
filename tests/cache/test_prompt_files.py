"""Prompt caches: what is decoded behind a loaded one is what the cache that wrote it decodes, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseattn import IVF, KVCache, LowBit, Quest, RetrievalAttention, Selector, decode
from sparseattn.cache.prompt_files import PromptFileError
from sparseattn.codecs.table import CODECS
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.utils.tensor_files import TensorFileError
from tests.cases import CASES, Case, attention, by_name, with_rope

B, H, G, N, D = 2, 2, 3, 200, 32
FAISS = ("ivf", "ivf-few", "hnsw", "hnsw-l2")
IN_TENSORS = [case for case in CASES if case.name not in FAISS]


def rows() -> tuple[Tensor, Tensor, Tensor]:
    return attention(B, H, G, N, D)


def made(selector: Selector, **settings: Any) -> KVCache:
    return KVCache(selector, **{"sink": 4, "window": 8, "seal": 32, **settings})


def prefilled(selector: Selector, **settings: Any) -> KVCache:
    """A padded batch of 150 and 120 rows, nothing of it sealed."""
    queries, keys, values = rows()
    cache, at = made(selector, **settings), torch.arange(150).repeat(B, 1)
    at[1, :30] = -1
    cache.append(keys[:, :, :150], values[:, :, :150], queries[:, :, :, :150], at)
    return cache


def stepped(cache: KVCache, first: int, last: int) -> list[Tensor]:
    """What the steps from token `first` up to `last` decode."""
    queries, keys, values = rows()
    outs = []
    for t in range(first, last):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        outs.append(decode(queries[:, :, :, t], cache, 40))
    return outs


def goes_on_alike(cache: KVCache, loaded: KVCache, at: int, last: int = N) -> None:
    assert loaded.counts == cache.counts
    assert loaded.nbytes == cache.nbytes
    for mine, other in zip(stepped(cache, at, last), stepped(loaded, at, last), strict=True):
        assert torch.equal(mine, other)


@by_name(IN_TENSORS, few=True)
def test_a_loaded_prompt_decodes_as_the_one_saved(case: Case, tmp_path: Path) -> None:
    """Saved before the first seal, behind it, and behind a later one; each goes on through further seals."""
    for ahead in (None, 0, 40):
        cache = prefilled(case.make())
        if ahead is not None:
            cache.seal()
            stepped(cache, 150, 150 + ahead)
        cache.save(tmp_path / "prompt")
        loaded = made(case.make()).load(tmp_path / "prompt")
        goes_on_alike(cache, loaded, 150 + (ahead or 0), N if ahead else 185)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_a_codec_keeps(codec: str, exact: bool, tmp_path: Path) -> None:
    given = {"rows": codec, "exact": exact, "seal": 64}
    cache = prefilled(with_rope(LowBit(rows=16)), **given)
    cache.seal()
    cache.save(tmp_path / "prompt")
    goes_on_alike(cache, made(with_rope(LowBit(rows=16)), **given).load(tmp_path / "prompt"), 150, 170)


@pytest.mark.parametrize("settings", [{"sealed_device": "cpu"}, {"fixed": True, "capacity": 256}, {"rollback": 3}])
def test_where_rows_lie_is_the_loaders_matter(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = prefilled(Quest(8))
    plain.seal()
    plain.save(tmp_path / "prompt")
    loaded = made(Quest(8), **settings).load(tmp_path / "prompt")
    assert loaded.counts == plain.counts
    for mine, other in zip(stepped(plain, 150, 165), stepped(loaded, 150, 165), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    loaded.save(tmp_path / "again")
    assert made(Quest(8)).load(tmp_path / "again").counts == loaded.counts


def test_a_loaded_cache_is_edited_as_another(tmp_path: Path) -> None:
    cache = prefilled(Quest(8))
    cache.seal()
    cache.save(tmp_path / "prompt")
    loaded = made(Quest(8)).load(tmp_path / "prompt")
    for each in (cache, loaded):
        each.crop(torch.tensor([3, 1]))
        each.reorder(torch.tensor([1, 1, 0]))
    assert loaded.counts == cache.counts
    assert torch.equal(loaded.clone().keys[:, :, :90], cache.keys[:, :, :90])
    cache.reset()
    cache.load(tmp_path / "prompt")
    goes_on_alike(cache, made(Quest(8)).load(tmp_path / "prompt"), 150, 160)


@pytest.mark.parametrize(
    ("selector", "settings", "said"),
    [
        (LowBit(rows=16), {}, "an index of quest, here it would be lowbit"),
        (Quest(16), {}, r'built with.*"page": 8.*"page": 16'),
        (Quest(8).for_layer(3), {}, "layer 0, and this selector serves layer 3"),
        (Quest(8), {"sink": 8}, "sink=4, and this cache has sink=8"),
        (Quest(8), {"window": 16}, "window=8"),
        (Quest(8), {"seal": 64}, "seal=32"),
        (Quest(8), {"rows": "kivi"}, "rows=None, and this cache has rows='kivi"),
    ],
)
def test_what_is_not_its_own_is_refused(
    selector: Selector, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    cache = prefilled(Quest(8))
    cache.seal()
    cache.save(tmp_path / "prompt")
    other = made(selector, **settings)
    with pytest.raises(PromptFileError, match=said):
        other.load(tmp_path / "prompt")
    assert other.batch == 0
    with pytest.raises(PromptFileError, match="empty cache"):
        cache.load(tmp_path / "prompt")


def test_a_knob_is_no_part_of_what_is_saved(tmp_path: Path) -> None:
    cache = prefilled(RetrievalAttention(beam=300))
    cache.seal()
    cache.save(tmp_path / "prompt")
    loaded = made(RetrievalAttention(beam=7)).load(tmp_path / "prompt")
    assert loaded.selector.beam == 7


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow), torch.float64], ids=str
)
def test_rows_of_another_dtype_do_not_go_on(dtype: torch.dtype, tmp_path: Path) -> None:
    queries, keys, values = (part.to(dtype) for part in rows())
    cache = made(Quest(8))
    cache.append(keys, values)
    cache.seal()
    cache.save(tmp_path / "prompt")
    loaded = made(Quest(8)).load(tmp_path / "prompt")
    assert torch.equal(decode(queries[:, :, :, -1], loaded, 40), decode(queries[:, :, :, -1], cache, 40))
    with pytest.raises(ValueError, match=str(dtype)):
        loaded.append(keys[:, :, :1].float(), values[:, :, :1].float())


def test_keys_of_another_rope_are_refused(tmp_path: Path) -> None:
    """A codec turns them back by the layer's. A cache that knows no RoPE takes those of any."""
    contexts = [LayerContext(0, rope=rope) for rope in (Rope.of(D), Rope.of(D, 500.0), None)]
    prefilled(Quest(8).for_layer(contexts[0])).save(tmp_path / "prompt")
    for context in (contexts[0], contexts[2]):
        made(Quest(8).for_layer(context)).load(tmp_path / "prompt")
    with pytest.raises(PromptFileError, match=r"turned by a RoPE .* slowest 0.0001778 .* applies a RoPE .* 0.002949"):
        made(Quest(8).for_layer(contexts[1])).load(tmp_path / "prompt")


def test_damage_is_found_and_leaves_the_cache_empty(tmp_path: Path) -> None:
    cache, path = prefilled(Quest(8)), tmp_path / "prompt"
    cache.seal()
    cache.save(path)
    whole = bytearray(path.read_bytes())
    for place in (len(whole) // 2, len(whole) - 3, 300):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        fresh = made(Quest(8))
        with pytest.raises(TensorFileError, match="damaged"):
            fresh.load(path)
        assert fresh.batch == 0
    with pytest.raises(TensorFileError, match="damaged or not a prompt cache"):
        made(Quest(8)).load(tmp_path / "none")


def test_what_faiss_keeps_is_not_written(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    cache = prefilled(IVF())
    cache.seal()
    with pytest.raises(PromptFileError, match=r"ivf.*not kept in tensors"):
        cache.save(tmp_path / "prompt")
    assert not (tmp_path / "prompt").exists()


def test_a_part_of_a_sequence_is_not_written(tmp_path: Path) -> None:
    cache = prefilled(Quest(8))
    cache.ranks = object()
    with pytest.raises(PromptFileError, match="a cache over ranks holds a part of the rows"):
        cache.save(tmp_path / "prompt")
