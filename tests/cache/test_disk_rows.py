"""Sealed rows in a mapped file: decoding is what it is in host memory, and the pages asked for are those chosen."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparseattn import KVCache, Quest, Selection, decode
from sparseattn.cache.disk_rows import DiskRows
from tests.cases import CASES, Case, attention, by_name

B, H, G, N, D = 2, 2, 3, 260, 32


def run(case: Case, place: str, ahead: int = 60) -> tuple[KVCache, list[Tensor]]:
    """What steps decode behind a padded prompt, through several seals."""
    queries, keys, values = attention(B, H, G, N, D)
    cache = KVCache(case.make(), sink=4, window=8, seal=32, sealed_device=place)
    at = torch.arange(150).repeat(B, 1)
    at[1, :30] = -1
    cache.append(keys[:, :, :150], values[:, :, :150], queries[:, :, :, :150], at)
    outs = []
    for t in range(150, 150 + ahead):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        outs.append(decode(queries[:, :, :, t], cache, 40))
    return cache, outs


@by_name(CASES, few=True)
def test_rows_on_disk_are_decoded_as_those_in_host_memory(case: Case, tmp_path: Path) -> None:
    cache, outs = run(case, f"disk:{tmp_path}")
    _, expected = run(case, "cpu")
    assert isinstance(cache.stored.sealed.keys, DiskRows)
    assert f"sealed_device='disk:{tmp_path}'" in repr(cache)
    assert not [*tmp_path.iterdir()], "a file without a name is gone with its process"
    for out, other in zip(outs, expected, strict=True):
        assert torch.equal(out, other)


def test_rows_on_disk_are_copied_reordered_saved_and_forgotten(tmp_path: Path) -> None:
    case = Case("quest", lambda: Quest(8), None)
    caches = [run(case, place, 50)[0] for place in (f"disk:{tmp_path}", "cpu")]
    queries, _, _ = attention(B, H, G, N, D)
    query = queries[:, :, :, -1]
    expected = decode(query, caches[1], 40)
    twin = caches[0].clone()
    caches[0].save(tmp_path / "prompt")
    caches[0].reorder(torch.tensor([1, 1]))
    assert torch.equal(decode(query, twin, 40), expected)
    assert torch.equal(decode(query, caches[0], 40)[1], expected[1])
    caches[0].reset()
    loaded = caches[0].load(tmp_path / "prompt")
    assert isinstance(loaded.stored.sealed.values, DiskRows)
    assert torch.equal(decode(query, loaded, 40), expected)


@pytest.mark.parametrize(("size", "dtype"), [(32, torch.float32), (80, torch.bfloat16), (2048, torch.float32)])
def test_the_pages_asked_for_are_those_of_the_chosen_rows(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rows smaller and larger than a page, spans that share pages, touch, are empty, or are another query head's."""
    rows = DiskRows(700, tmp_path)
    rows.append(torch.zeros(2, 2, 500, size, dtype=dtype))
    draw = torch.Generator().manual_seed(size)
    start = torch.randint(0, 480, (2, 4, 30), generator=draw, dtype=torch.int32)
    length = torch.randint(0, 17, (2, 4, 30), generator=draw, dtype=torch.int32)
    asked = rows._ranges(Selection(start, length, 16))
    storage = rows.full
    base, page, row = storage.data_ptr(), mmap.PAGESIZE, size * dtype.itemsize
    wanted = set()
    for b in range(2):
        for list_ in range(4):
            for first, count in zip(start[b, list_].tolist(), length[b, list_].tolist(), strict=True):
                low = ((b * 2 + list_ // 2) * storage.shape[2] + first) * row
                if count:
                    wanted |= set(range((base + low) // page, (base + low + count * row - 1) // page + 1))
    got = [number for a, b in asked for number in range((base + a) // page, (base + b - 1) // page + 1)]
    assert sorted(got) == got, "in the order of the file"
    assert set(got) == wanted
    assert len(got) == len(wanted), "each page once"


@pytest.mark.slow
def test_a_killed_process_leaves_no_rows_and_the_prompt_cache_that_it_decoded(tmp_path: Path) -> None:
    """The saved file is whole while a process decodes behind it, and after it was killed."""
    cache, _ = run(Case("quest", lambda: Quest(8), None), "cpu", 50)
    cache.save(tmp_path / "prompt")
    saved = (tmp_path / "prompt").read_bytes()
    code = f"""
import torch
from sparseattn import KVCache, Quest, decode
cache = KVCache(Quest(8), sink=4, window=8, seal=32, sealed_device="disk:{tmp_path}").load({str(tmp_path / "prompt")!r})
while True:
    cache.append(*torch.randn(2, {B}, {H}, 1, {D}))
    decode(torch.randn({B}, {H}, {G}, {D}), cache, 40)
    print("step", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(40):
        assert process.stdout.readline() == "step\n"
    process.kill()
    process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["prompt"]
    assert (tmp_path / "prompt").read_bytes() == saved
    query = attention(B, H, G, N, D)[0][:, :, :, -1]
    again = KVCache(Quest(8), sink=4, window=8, seal=32, sealed_device=f"disk:{tmp_path}").load(tmp_path / "prompt")
    assert torch.equal(decode(query, again, 40), decode(query, cache, 40))


def test_where_no_file_can_be_made_is_refused_at_once(tmp_path: Path) -> None:
    for given in ("disk:", f"disk:{tmp_path}/none"):
        with pytest.raises(ValueError, match="a folder that is there"):
            KVCache("quest", sealed_device=given)
    with pytest.raises(ValueError, match="take one of the two"):
        KVCache("lowbit", sealed_device=f"disk:{tmp_path}", rows="kivi")
    with pytest.raises(ValueError, match=r"'cpu' \(host memory\) or 'disk:FOLDER'"):
        KVCache("quest", sealed_device="cuda")
