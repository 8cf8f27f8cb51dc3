"""Index files: written once, read back to the same selections, refused where they do not belong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, Case, attention

from sparseattn import HNSW, KVCache, Quest, RetrievalAttention, Rows, Selector, decode
from sparseattn.indexes import IndexFileError, load_index, save_index
from sparseattn.storage import RowBuffer

B, H, G, N, D = 2, 2, 3, 200, 32


def prefilled(selector: Selector, folder: Path | None = None, seed_rows: int = N, **settings) -> KVCache:
    queries, keys, values = attention(B, H, G, seed_rows, D)
    cache = KVCache(selector, sink=4, window=8, seal=32, indexes=folder, **settings)
    at = torch.arange(150).repeat(B, 1)
    at[1, :30] = -1
    cache.append(keys[:, :, :150], values[:, :, :150], queries[:, :, :, :150], at)
    cache.seal()
    return cache


def shown() -> Rows:
    queries, keys, values = attention(B, H, G, 128, D)
    at = torch.arange(128).repeat(B, 1)
    return Rows(keys, values, at, queries, at)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cache_that_found_its_index_decodes_as_the_one_that_built_it(case: Case, tmp_path: Path) -> None:
    queries, keys, values = attention(B, H, G, N, D)
    built, found, plain = prefilled(case.make(), tmp_path), prefilled(case.make(), tmp_path), prefilled(case.make())
    tensors_only = all(isinstance(state, RowBuffer) for _, state in plain.selector.buffers())
    assert len(list(tmp_path.iterdir())) == int(tensors_only)
    for t in range(150, N):
        one = slice(t, t + 1)
        chosen = []
        for cache in (built, found, plain):
            cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
            chosen.append(decode(queries[:, :, :, t], cache, 40))
        assert torch.equal(chosen[0], chosen[2])
        assert torch.equal(chosen[1], chosen[2])
    assert len(list(tmp_path.iterdir())) == int(tensors_only), "what decoding adds is not written"


def test_the_second_cache_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled(RetrievalAttention(), tmp_path)

    def build(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(RetrievalAttention, "append", build)
    prefilled(RetrievalAttention(beam=7), tmp_path)  # the search's knob is no part of the index
    with pytest.raises(AssertionError, match="built again"):
        prefilled(RetrievalAttention(degree=8), tmp_path)


def test_files_are_refused_where_they_do_not_belong(tmp_path: Path) -> None:
    rows, path = shown(), tmp_path / "index.safetensors"
    selector = Quest()
    save_index(selector, rows, selector.append(rows), path)
    fresh = Quest()
    load_index(fresh, rows, path)
    assert torch.equal(fresh.low.data, selector.low.data)

    with pytest.raises(IndexFileError, match=r"Quest.*here it would be.*RetrievalAttention"):
        load_index(RetrievalAttention(), rows, path)
    with pytest.raises(IndexFileError, match=r'built with.*"page": 16.*"page": 32'):
        load_index(Quest(32), rows, path)
    other = Rows(rows.keys + 1, rows.values, rows.positions)
    with pytest.raises(IndexFileError, match="rows with SHA-256"):
        load_index(Quest(), other, path)
    with pytest.raises(IndexFileError, match="no file"):
        load_index(Quest(), rows, tmp_path / "none")
    with pytest.raises(IndexFileError, match="no tensor"):
        save_index(HNSW(), rows, None, path)


def test_damage_is_found(tmp_path: Path) -> None:
    rows, path = shown(), tmp_path / "index.safetensors"
    selector = RetrievalAttention()
    save_index(selector, rows, selector.append(rows), path)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", b"not a file of tensors", whole[:9] + b"?" + whole[10:]):
        path.write_bytes(damaged)
        with pytest.raises(IndexFileError, match="damaged"):
            load_index(RetrievalAttention(), rows, path)
    flipped = bytearray(whole)
    flipped[-100] ^= 1  # a length that still fits, another number
    path.write_bytes(bytes(flipped))
    fresh = RetrievalAttention()
    with pytest.raises(IndexFileError, match="not those that were written"):
        load_index(fresh, rows, path)
    assert not any(state.rows for _, state in fresh.buffers()), "a refused file leaves nothing behind"

    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(IndexFileError, match="not an index"):
        load_index(RetrievalAttention(), rows, path)
    save_file({"a": torch.zeros(1)}, path, {"format": "sparseattn-index", "version": "9"})
    with pytest.raises(IndexFileError, match="version 9"):
        load_index(RetrievalAttention(), rows, path)


def test_a_folder_that_cannot_be_one_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be kept in"):
        KVCache(Quest(), indexes=tmp_path / "file")


def test_other_queries_make_another_index(tmp_path: Path) -> None:
    queries, keys, values = attention(B, H, G, 150, D)
    for asked in (queries, queries.flip(2), queries[:, :, :1]):
        cache = KVCache(RetrievalAttention(), sink=4, window=8, indexes=tmp_path)
        cache.append(keys, values, asked)
        cache.seal()
    assert len(list(tmp_path.iterdir())) == 3


def test_what_the_build_warned_of_is_said_again(tmp_path: Path) -> None:
    queries, keys, values = attention(B, H, G, 150, D)
    for _ in range(2):
        cache = KVCache(RetrievalAttention(share=0.0), sink=4, window=8, indexes=tmp_path)
        cache.append(keys, values, queries)
        with pytest.warns(UserWarning, match="the keys serve as queries"):
            cache.seal()


def test_an_index_that_cannot_be_kept_serves_all_the_same(tmp_path: Path) -> None:
    queries, keys, values = attention(B, H, G, 150, D)
    folder = tmp_path / "gone"
    cache = KVCache(RetrievalAttention(), sink=4, window=8, indexes=folder)
    cache.append(keys, values, queries)
    folder.rmdir()
    with pytest.warns(UserWarning, match=r"could not be kept.*gone"):
        cache.seal()
    assert decode(queries[:, :, :, -1], cache, 20).isfinite().all()


@pytest.mark.parametrize("entry", ["warnings", "rows", "arguments", "more"])
def test_metadata_is_under_the_hash(tmp_path: Path, entry: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    rows, path = shown(), tmp_path / "index.safetensors"
    selector = Quest()
    save_index(selector, rows, selector.append(rows), path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, {**metadata, entry: '["said by nobody"]'})
    with pytest.raises(IndexFileError, match="metadata are not those that were written"):
        load_index(Quest(), rows, path)
