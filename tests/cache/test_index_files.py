"""Index files: written once, read back to the same selections, refused where they do not belong."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

import pytest
import torch

from sparseattn import (
    SAAP,
    KMeans,
    KVCache,
    Moments,
    QueryBridge,
    QueryPQ,
    Quest,
    RetrievalAttention,
    Rows,
    Selector,
    decode,
)
from sparseattn.cache.index_files import FORMAT, VERSION, IndexFileError, append_kept, keepers, kept, load_index
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors import methods
from sparseattn.selectors.abilities import LearnsFromQueries
from sparseattn.utils.tensor_files import load_tensors, save_tensors
from tests.cases import CASES, Case, attention, by_name, drawn

B, H, G, N, D = 2, 2, 3, 200, 32
KEPT = (*keepers(), "perfect")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "prompt-caches.md"


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


def written(selector: Selector, rows: Rows, folder: Path) -> Path:
    """The file of the index that `selector` builds from `rows`, the only one in `folder`."""
    append_kept(selector, rows, folder)
    (path,) = folder.iterdir()
    return path


@by_name(CASES, few=True)
def test_a_cache_that_found_its_index_decodes_as_the_one_that_built_it(case: Case, tmp_path: Path) -> None:
    queries, keys, values = attention(B, H, G, N, D)
    plain, files = prefilled(case.make()), int(case.name.partition("-")[0] in KEPT or case.name == "same")
    loses = not files and any(True for _ in plain.selector.buffers())
    with pytest.warns(UserWarning, match="keeps no index in a folder") if loses else contextlib.nullcontext():
        built = prefilled(case.make(), tmp_path)
    found = prefilled(case.make(), tmp_path)  # which says nothing again
    assert files == int(kept(plain.selector))
    assert len(list(tmp_path.iterdir())) == files
    for t in range(150, N):
        one = slice(t, t + 1)
        chosen = []
        for cache in (built, found, plain):
            cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
            chosen.append(decode(queries[:, :, :, t], cache, 40))
        assert torch.equal(chosen[0], chosen[2])
        assert torch.equal(chosen[1], chosen[2])
    assert len(list(tmp_path.iterdir())) == files, "what decoding adds is not written"


def test_the_warning_and_the_page_name_the_methods_that_keep_one(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"lowbit keeps no index .* methods that do are bridge, .*, quest, ") as said:
        KVCache("lowbit", indexes=tmp_path)
    named = str(said[0].message).partition("methods that do are ")[2].split(", ")
    section = PAGE.read_text().partition("## Index files")[2]
    assert named == keepers() == re.findall(r"`(\w+)`", section.partition("Kept are those of")[2].partition(".")[0])


def test_the_second_cache_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled(RetrievalAttention(), tmp_path)

    def build(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(RetrievalAttention, "append", build)
    prefilled(RetrievalAttention(beam=7), tmp_path)  # the search's knob is no part of the index
    with pytest.raises(AssertionError, match="built again"):
        prefilled(RetrievalAttention(degree=8), tmp_path)


def test_an_earlier_releases_file_is_passed_over(tmp_path: Path) -> None:
    """Version 1 had no version in its files' names."""
    rows, selector = shown(), Quest()
    path = written(selector, rows, tmp_path)
    metadata, state = load_tensors(path, FORMAT, VERSION, "an index")
    known = "\n".join(metadata[name] for name in ("selector", "arguments", "rows"))
    old = path.with_name(f"Quest-{hashlib.sha256(known.encode()).hexdigest()[:24]}.safetensors")
    save_tensors(old, state, {**metadata, "version": "1"})
    path.unlink()
    before, fresh = old.read_bytes(), Quest()
    append_kept(fresh, rows, tmp_path)
    assert torch.equal(fresh.low.data, selector.low.data)
    assert old.read_bytes() == before
    assert set(tmp_path.iterdir()) == {old, path}


def test_a_class_whose_file_moves_keeps_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(Quest(), shown(), tmp_path)
    assert path.name.startswith("quest-")
    monkeypatch.setattr(Quest, "__module__", "sparseattn.elsewhere")
    monkeypatch.setitem(methods.NAMES, "sparseattn.elsewhere:Quest", "quest")
    assert written(Quest(), shown(), tmp_path) == path
    assert load_tensors(path, FORMAT, VERSION, "an index")[0]["selector"] == "quest"


def test_files_are_refused_where_they_do_not_belong(tmp_path: Path) -> None:
    rows, selector = shown(), Quest()
    path = written(selector, rows, tmp_path)
    fresh = Quest()
    load_index(fresh, rows, path)
    assert torch.equal(fresh.low.data, selector.low.data)

    with pytest.raises(IndexFileError, match="an index of quest, here it would be retrieval"):
        load_index(RetrievalAttention(), rows, path)
    with pytest.raises(IndexFileError, match=r'built with.*"page": 16.*"page": 32'):
        load_index(Quest(32), rows, path)
    other = Rows(rows.keys + 1, rows.values, rows.positions)
    with pytest.raises(IndexFileError, match="rows with SHA-256"):
        load_index(Quest(), other, path)
    with pytest.raises(IndexFileError, match="no file"):
        load_index(Quest(), rows, tmp_path / "none")


def test_codes_of_keys_less_another_mean_are_another_index(tmp_path: Path) -> None:
    rows = shown()
    of = {}
    for mean in ("plain", "rope"):
        (tmp_path / mean).mkdir()
        of[mean] = written(QueryPQ(4, mean=mean), rows, tmp_path / mean)
    for mean, other, said in (("auto", "plain", "rope"), ("rope", "plain", "rope"), ("plain", "rope", "plain")):
        with pytest.raises(IndexFileError, match=f'built with .*"mean": "{other}".* would be .*"mean": "{said}"'):
            load_index(QueryPQ(4, mean=mean), rows, of[other])
    fresh = QueryPQ(4)
    load_index(fresh, rows, of["rope"])
    assert torch.equal(fresh.at.data, rows.positions.int())


def test_damage_is_found(tmp_path: Path) -> None:
    rows = shown()
    path = written(RetrievalAttention(), rows, tmp_path)
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


def test_the_prompts_last_queries_and_what_they_attend_to_are_of_the_index(tmp_path: Path) -> None:
    class Prompted(LearnsFromQueries, Quest):
        last_queries = 4

    queries, keys, values = attention(B, H, G, 160, D)
    other, nearer = queries.clone(), keys.clone()
    other[:, :, :, 149], nearer[:, :, 149] = 0, 0  # a row of the window, which is not indexed
    for rows, asked, files in ((keys, queries, 1), (keys, other, 2), (nearer, queries, 3), (keys, queries, 3)):
        cache = KVCache(Prompted(), sink=4, window=8, indexes=tmp_path)
        cache.append(rows[:, :, :150], values[:, :, :150], asked[:, :, :, :150])
        cache.seal()
        assert len(list(tmp_path.iterdir())) == files
    cache = KVCache(Quest(), sink=4, window=8, indexes=tmp_path)
    for _ in range(2):
        cache.append(keys[:, :, :150], values[:, :, :150])
        cache.seal()
        cache.reset()
    assert len(list(tmp_path.iterdir())) == 4


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

    rows, selector = shown(), Quest()
    path = written(selector, rows, tmp_path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, {**metadata, entry: '["said by nobody"]'})
    with pytest.raises(IndexFileError, match="metadata are not those that were written"):
        load_index(Quest(), rows, path)


def padded() -> Rows:
    """128 rows of which the second sequence has 32."""
    queries, keys, values = attention(B, H, G, 128, D)
    at = torch.arange(128).repeat(B, 1)
    at[1, 32:] = -1
    keys[1, :, 32:], values[1, :, 32:], queries[1, :, :, 32:] = 0, 0, 0
    return Rows(keys, values, at, queries, at)


def small_retrieval() -> Selector:
    return RetrievalAttention(neighbours=10, degree=4, guides=5, metric="query")


def small_bridge() -> Selector:
    return QueryBridge(neighbours=10, guides=5)


def missed_codes() -> Selector:
    selector = QueryPQ(2, share=1.0, missed=0.05)
    selector.bind(LayerContext(0, rope=Rope.of(D)))
    return selector


def _bytes(number: float) -> torch.Tensor:
    """Those of an int32 or a float32."""
    return torch.tensor([number]).to(torch.int32 if isinstance(number, int) else torch.float32).view(torch.uint8)


def named_twice(state: dict[str, torch.Tensor]) -> None:
    state["missed_rows"] = state["missed_rows"].clone()
    state["missed_rows"][0, 0, 1] = state["missed_rows"][0, 0, 0]


def small_codes() -> Selector:
    return QueryPQ(4, sample=64)


def plain_codes() -> Selector:
    return QueryPQ(4, sample=64, mean="plain")


def put(name: str, place: tuple, value: object):
    """Changes one entry of a tensor, of whatever dtype."""

    def change(state: dict[str, torch.Tensor]) -> None:
        state[name] = state[name].clone()
        state[name][place] = value

    return change


def circle(state: dict[str, torch.Tensor]) -> None:
    """Two keys of one graph are each other's parent, and list each other."""
    parent, adjacency = state["parent"].clone(), state["adjacency"].clone()
    a, b = [k for k in range(3) if k != int(state["entry"][0, 0, 0])][:2]
    parent[0, 0, a], parent[0, 0, b], adjacency[0, 0, a, 0], adjacency[0, 0, b, 0] = b, a, b, a
    state.update(parent=parent, adjacency=adjacency)


WRONG = [
    (Quest, lambda s: s.pop("low"), "holds high where high, low are wanted"),
    (Quest, lambda s: s.update(more=torch.zeros(1)), "high, low, more where"),
    (Quest, lambda s: s.update(low=s["low"].half()), "low is torch.float16"),
    (Quest, lambda s: s.update(low=s["low"][:, :, :-1]), r"low is .*\[2, 2, 7, 32\], wanted is .*\[2, 2, 8, 32\]"),
    (Quest, lambda s: s.update(low=torch.tensor(1.0)), r"low is torch.float32 \[\]"),
    (Quest, lambda s: s.update(order=torch.zeros(2, 2, 128, dtype=torch.int64)), "permutation of the 128 rows"),
    (Quest, lambda s: s.update(order=torch.arange(128).expand(2, 2, -1)), "an order of the rows where the method has"),
    (Quest, put("high", (0, 0, 0, 0), torch.nan), "high has entries that are no numbers"),
    (Quest, put("high", (0, 0, 0, 0), torch.inf), "high has entries that are not finite"),
    (Quest, put("low", (0, 0, 0, 0), 1e9), "least key is above its largest"),
    (lambda: Quest(int8=True), lambda s: s.pop("step"), "where high, low, step are wanted"),
    (lambda: Quest(int8=True), put("step", (0, 0, 0), 0.0), "a step is not above 0"),
    (small_retrieval, lambda s: s.pop("parent"), "where adjacency, bias, entry, guide, lists, parent, root, scores"),
    (small_retrieval, put("adjacency", (0, 0, 0, 0), 1 << 30), "adjacency has entries from -1 to 1073741824"),
    (small_retrieval, put("adjacency", (0, 0, 0, 0), -2), "adjacency has entries from -2"),
    (small_retrieval, put("adjacency", (1, 0, 0, 0), 32), "of 32 rows it names 0 to 31"),
    (small_retrieval, put("adjacency", (0, 0, 0), torch.tensor([-1, 1, 1, 1])), "go on behind their end"),
    (small_retrieval, put("adjacency", (0, 0), -1), "a key is not reached"),
    (small_retrieval, put("entry", (0, 0, 0), 128), "the entry 128"),
    (small_retrieval, put("entry", (0, 0, 0), -1), "the entry -1"),
    (small_retrieval, put("parent", (0, 0, 0), 128), "parents are keys 0 to 127"),
    (small_retrieval, put("parent", (1, 0, 32), 0), "the tree does not fit 32 keys of 128 rows"),
    (small_retrieval, circle, "a key is not reached"),
    (small_retrieval, put("lists", (0, 0, 0, 0), 1 << 30), "lists has entries"),
    (small_retrieval, put("scores", (0, 0, 0, 0), -torch.inf), "scores are not those of the rows in lists"),
    (small_retrieval, put("bias", (0, 0, 0), torch.inf), "bias has entries that are not finite"),
    (small_bridge, put("lists", (0, 0, 0, 0), 1 << 30), "lists has entries from"),
    (small_bridge, put("lists", (1, 0, 0, 0), 32), "of 32 rows it names 0 to 31"),
    (small_bridge, lambda s: s.pop("root"), "where direction, guide, lists, root, scores, valid are wanted"),
    (small_bridge, put("valid", (0, 0), False), "valid is not that of the rows shown"),
    (small_bridge, put("scores", (0, 0, 0, 9), torch.nan), "no numbers"),
    (small_bridge, put("direction", (0, 0, 0, 0), torch.inf), "direction has entries that are not finite"),
    (small_codes, lambda s: s.pop("turn"), "where at, back, centre, centroids, codes, known, root, turn are"),
    (small_codes, put("at", (0, 5), 7), "at is not that of the rows shown"),
    (small_codes, put("root", (0, 0, 0), torch.inf), "root has entries that are not finite"),
    (plain_codes, lambda s: s.pop("turn"), "where back, centre, centroids, codes, known, turn are wanted"),
    (small_codes, lambda s: s.update(codes=s["codes"][..., :-1].contiguous()), r"codes is .*\[2, 2, 2, 127\], wanted"),
    (small_codes, put("centroids", (0, 0, 0, 0, 0), torch.inf), "centroids has entries that are not finite"),
    (small_codes, put("known", (1, 0), False), "known is not that of the rows shown"),
    (missed_codes, put("missed_rows", (0, 0, 0, slice(4)), _bytes(128)), "missed_rows names rows .* to 128, of 128"),
    (missed_codes, put("missed_rows", (0, 0, 0, slice(4)), _bytes(-2)), "missed_rows names rows -2 to"),
    (missed_codes, named_twice, "missed_rows names a row twice"),
    (
        missed_codes,
        put("missed_rows", (0, 0, 0, slice(4, 8)), _bytes(torch.inf)),
        "missed_rows has entries that are not",
    ),
    (
        missed_codes,
        lambda s: s.update(missed_rows=s["missed_rows"][:, :, 1:].contiguous()),
        "missed_rows is torch.uint8",
    ),
    (missed_codes, put("limit", (0, 0, 0), torch.inf), "limit has entries that are not finite"),
    *(
        (made, change, sentence)
        for made in (lambda: drawn(SAAP, context=0.5), lambda: drawn(KMeans), lambda: drawn(Moments))
        for change, sentence in (
            (put("edges", (0, 0, 0, 5), 1 << 30), "do not rise from 0 to the 128 rows"),
            (put("edges", (0, 0, 0, 0), -1), "do not rise from 0"),
            (put("edges", (1, 0, 0, -2), 128), "do not leave the rows of padding apart"),
            (lambda s: s.update(edges=s["edges"][..., 1:].contiguous()), r"edges is .*\[2, 2, 1, 13\], wanted"),
            (lambda s: s.pop("order"), "no order of the rows"),
            (lambda s: s.update(order=s["order"].int()), "order is int64"),
            (lambda s: s.update(order=torch.arange(128).flip(0).expand(2, 2, -1)), "mixes rows of padding"),
        )
    ),
    (lambda: drawn(Moments), lambda s: s.pop("moments"), "where edges, moments are wanted"),
    (lambda: drawn(Moments), put("moments", (0, 0, 0, 0), torch.inf), "moments has entries that are not finite"),
    (lambda: drawn(Moments), put("moments", (0, 0, 0, D), -1.0), "negative variance"),
    (lambda: drawn(Moments), put("moments", (0, 0, 0, -1), 999.0), "count other rows than the buckets hold"),
    (lambda: drawn(SAAP), lambda s: s.update(moments=torch.zeros(1)), "edges, moments where edges are wanted"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
@pytest.mark.filterwarnings("ignore:.*no queries of the prefill:UserWarning")
def test_wrong_contents_under_a_right_hash_are_refused(number: int, tmp_path: Path) -> None:
    """Compiled code would read past the end of the keys, or rows of padding would be found."""
    make, change, sentence = WRONG[number]
    rows = padded()
    path = written(make(), rows, tmp_path)
    metadata, state = load_tensors(path, FORMAT, VERSION, "an index")
    load_index(make(), rows, path)
    change(state)
    save_tensors(path, state, metadata)
    fresh = make()
    with pytest.raises(IndexFileError, match=f"damaged index: .*{sentence}"):
        load_index(fresh, rows, path)
    assert not any(state.rows for _, state in fresh.buffers()), "nothing is filled before all is checked"


@pytest.mark.parametrize("said", ["{", "7", "[7]", "null", "[" * 9999])
def test_warnings_that_are_no_texts_are_refused(said: str, tmp_path: Path) -> None:
    rows = shown()
    path = written(Quest(), rows, tmp_path)
    metadata, state = load_tensors(path, FORMAT, VERSION, "an index")
    save_tensors(path, state, {**metadata, "warnings": said})
    fresh = Quest()
    with pytest.raises(IndexFileError, match="damaged index"):
        load_index(fresh, rows, path)
    assert not fresh.low.rows


class QuestAndMore(Quest):
    """Keeps what Quest's `check_state` does not know."""

    def __init__(self, page: int = 16) -> None:
        super().__init__(page)
        self.mean = RowBuffer(2)

    def append(self, rows: Rows) -> None:
        super().append(rows)
        self.mean.append(rows.keys)


def test_a_subclass_that_keeps_more_than_its_check_knows_writes_no_file(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"could not be kept: .*would not read .* back: it holds high, low, mean"):
        cache = prefilled(QuestAndMore(), tmp_path)
    assert not list(tmp_path.iterdir())
    assert cache.selector.mean.rows
