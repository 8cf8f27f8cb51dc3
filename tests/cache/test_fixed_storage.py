"""A cache of fixed storage: what an ordinary one gives, at addresses that never change."""

from __future__ import annotations

import pytest
import torch

from sparseattn import Exact, KVCache, QueryBridge, Quest, Window, decode
from sparseattn.cache import input_checks
from sparseattn.core.row_buffer import RowBuffer
from tests.cases import CASES, ON_DEVICE, Case, attention

B, H, G, D = 2, 2, 3, 32
BY_NAME = pytest.mark.parametrize("case", ON_DEVICE, ids=lambda case: case.name)


def cache_of(case: Case, fixed: bool, **sizes) -> KVCache:
    given = {"sink": 4, "window": 8, "seal": 32} | sizes
    return KVCache(case.make(), **given, capacity=300 if fixed else 0, fixed=fixed)


def addresses(cache: KVCache) -> dict[str, int]:
    """Of what a step reads: not what Exact has just chosen, nor what QueryBridge looks at when rows are sealed."""
    unread = ("kept", "valid") if isinstance(cache.selector, QueryBridge) else ("kept",)
    parts = {name: state.full for name, state in cache.selector.buffers() if state.rows and name not in unread}
    bounds = {name: getattr(cache.bounds, name) for name in ("sink", "sealed", "rows")}
    read = {"keys": cache.keys, "values": cache.values, "positions": cache.positions, **parts, **bounds}
    read["real rows"] = cache.search.step().valid
    return {name: part.data_ptr() for name, part in read.items()}


@BY_NAME
def test_it_gives_what_an_ordinary_cache_gives(case: Case) -> None:
    """Token by token, through several seals, dropped tokens, beams and a clone; and a second batch, in steps of 14."""
    queries, keys, values = attention(B, H, G, 260, D)
    cache, plain = (cache_of(case, fixed, rollback=4) for fixed in (True, False))
    held: dict[str, int] = {}
    draft = torch.randn(B, H, 4, D)
    for batch in range(2):
        end = 0
        for t in range(119, 260) if not batch else range(105, 260, 14):
            part, end = slice(end, t), t
            for one in (cache, plain):
                one.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part])
                if t % 35 == 0 and t > 150:
                    one.append(draft, draft, draft[:, :, None].expand(-1, -1, G, -1, -1))
                    one.crop(4)
                if t == 189:
                    one.reorder(torch.tensor([1, 0]))
                one.seal()
            if t % 7:
                continue
            query = queries[:, :, :, t - 1]
            torch.testing.assert_close(decode(query, cache, 40), decode(query, plain, 40), rtol=1e-5, atol=1e-5)
            ours, theirs = cache.search.latest, plain.search.latest
            assert ours is not None
            assert theirs is not None
            for name in ("attended", "scanned", "scan_bytes"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            if not held:
                held = addresses(cache)
            assert addresses(cache) == held
            if t == 203 and not batch:
                twin, alike = cache.clone(), plain.clone()
                assert not set(addresses(twin).values()) & set(held.values())
        assert int(cache.sealed[0]) > 200
        cache.reset()
        plain.reset()
    for t in range(203, 243, 5):
        part = slice(t, t + 5)
        for one in (twin, alike):
            one.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part])
        query = queries[:, :, :, t + 4]
        torch.testing.assert_close(decode(query, twin, 40), decode(query, alike, 40), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.by_turns)  # second forms are slow anyway
        for case in ON_DEVICE
    ],
)
def test_a_padded_batch(case: Case) -> None:
    queries, keys, values = attention(B, H, G, 172, D)
    cache, plain = (cache_of(case, fixed) for fixed in (True, False))
    at = torch.stack([torch.arange(100), torch.arange(100) - 60]).clamp(min=-1)
    for one in (cache, plain):
        one.append(keys[:, :, :100], values[:, :, :100], queries[:, :, :, :100], at)
    for t in range(100, 172, 3):
        part = slice(t, t + 3)
        for one in (cache, plain):
            one.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part])
        query = queries[:, :, :, t + 2]
        torch.testing.assert_close(decode(query, cache, 40), decode(query, plain, 40), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ON_DEVICE], ids=lambda case: case.name)
def test_selectors_whose_step_the_host_takes_part_in_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="fixed=True"):
        cache_of(case, True)


def test_what_does_not_fit_is_refused_and_nothing_lost() -> None:
    queries, keys, values = attention(B, H, G, 120, D)
    cache = KVCache(Quest(), sink=4, window=8, seal=32, capacity=125, fixed=True)
    with pytest.raises(ValueError, match=r"fixed at 125 rows a sequence less 15 for padding: \[120, 120\] more"):
        cache.append(keys, values)
    assert cache.batch == 0
    cache.append(keys[:, :, :100], values[:, :, :100])
    with pytest.raises(ValueError, match=r"\[20, 20\] more behind \[100, 100\] do not fit"):
        cache.append(keys[:, :, 100:], values[:, :, 100:])
    with pytest.raises(ValueError, match="fixed at 2 sequences"):
        cache.reorder(torch.tensor([0, 0, 1]))
    padded = torch.arange(100, 120).expand(B, -1).clone()
    padded[:, 10:] = -1  # padding takes no room
    cache.append(keys[:, :, 100:], values[:, :, 100:], positions=padded)
    plain = KVCache(Quest(), sink=4, window=8, seal=32)
    plain.append(keys[:, :, :110], values[:, :, :110])
    query = queries[:, :, :, 109]
    torch.testing.assert_close(decode(query, cache, 40), decode(query, plain, 40))


def test_another_batch_must_be_of_the_same_shape() -> None:
    queries, keys, values = attention(B, H, G, 60, D)
    cache = KVCache(Exact(), capacity=100, fixed=True)
    cache.append(keys, values)
    cache.reset()
    twin = cache.clone()
    for one in (cache, twin):
        with pytest.raises(ValueError, match=r"storage is .B,H,N,D. = .2, 2, 'N', 32., got keys .1, 2, 60, 32."):
            one.append(keys[:1], values[:1])
        with pytest.raises(ValueError, match=r"storage is torch.float32"):
            one.append(keys.half(), values.half())
        one.append(keys, values)
        assert decode(queries[:, :, :, -1], one, 10).shape == (B, H, G, D)


def test_a_ragged_batch_has_room_for_the_padding_of_a_seal() -> None:
    """What `append` accepts can be sealed: sequences out of phase are sealed into whole pages each."""
    queries, keys, values = attention(B, H, G, 140, D)
    for capacity in range(124, 132):
        cache = KVCache(Quest(), sink=4, window=8, seal=32, capacity=capacity, fixed=True)
        at = torch.stack([torch.arange(112), torch.arange(112) - 13]).clamp(min=-1)
        if capacity < 112 + 15:
            with pytest.raises(ValueError, match="less 15 for padding"):
                cache.append(keys[:, :, :112], values[:, :, :112], positions=at)
            continue
        cache.append(keys[:, :, :112], values[:, :, :112], positions=at)
        decode(queries[:, :, :, 111], cache, 40)
        assert cache.sealed.tolist() == [96, 80]


def test_one_selector_serves_one_fixed_cache() -> None:
    selector = Exact()
    KVCache(selector, capacity=100, fixed=True)
    for fixed in (True, False):
        with pytest.raises(ValueError, match="fixed for another cache"):
            KVCache(selector, capacity=100, fixed=fixed)
    KVCache(selector.for_layer(1))


def test_what_no_cuda_graph_can_hold_is_refused_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = attention(B, H, G, 200, D)
    cache = KVCache(Quest(), sink=4, window=90, seal=32, capacity=250, fixed=True)
    cache.append(keys[:, :, :90], values[:, :, :90])
    query = queries[:, :, :, 89]

    def inside(refused: str, work) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(input_checks, "capturing", lambda rows: True)
            with pytest.raises(RuntimeError, match=refused):
                work()

    inside("nothing is sealed yet", lambda: decode(query, cache, 40))
    inside("storing rows goes by counts", lambda: cache.append(keys[:, :, 90:], values[:, :, 90:]))
    cache.append(keys[:, :, 90:], values[:, :, 90:])
    inside("sealing rows goes by counts", cache.seal)
    inside("dropping rows goes by counts", lambda: cache.crop(1))
    cache.seal()
    inside("reordering sequences goes by counts", lambda: cache.reorder(torch.tensor([1, 0])))
    with monkeypatch.context() as patch:
        patch.setattr(input_checks, "capturing", lambda rows: True)
        decode(query, cache, 40)
    assert "capacity=250, fixed=True" in repr(cache)


@pytest.mark.parametrize("given", [{}, {"capacity": 19}, {"capacity": 100, "sealed_device": "cpu"}])
def test_it_needs_a_capacity_on_one_device(given: dict) -> None:
    with pytest.raises(ValueError, match="20 rows or more"):
        KVCache(Quest(), fixed=True, **given)


def test_a_share_or_all_as_budget_counts_up_to_the_capacity() -> None:
    _, keys, values = attention(B, H, G, 60, D)
    cache = KVCache(Window(), capacity=100, fixed=True)
    cache.append(keys, values)
    query = keys[:, :, None, -1].expand(-1, -1, G, -1)
    assert cache.prepare(query, None).rows == 100
    assert cache.prepare(query, 0.1).rows == 6


class TestRowBuffer:
    def test_addresses_and_spare_rows(self) -> None:
        buffer = RowBuffer(1, spare=-1)
        buffer.fix(5)
        buffer.append(torch.arange(6).view(2, 3))
        assert buffer.visible.tolist() == [[0, 1, 2, -1, -1], [3, 4, 5, -1, -1]]
        place = buffer.full.data_ptr()
        buffer.resize(1, buffer.full)
        assert buffer.visible.tolist() == [[0, -1, -1, -1, -1], [3, -1, -1, -1, -1]]
        buffer.take(torch.tensor([1, 1]))
        assert buffer.data.tolist() == [[3], [3]]
        assert buffer.clone().visible.tolist() == buffer.visible.tolist()
        buffer.reset()
        assert buffer.visible.tolist() == [[-1] * 5] * 2
        assert buffer.full.data_ptr() == place
        assert buffer.fresh().room is None

    def test_it_is_fixed_before_it_is_filled_and_holds_no_more(self) -> None:
        buffer = RowBuffer(1)
        buffer.fix()
        buffer.append(torch.zeros(2, 3))
        assert buffer.visible.shape == (2, 3)
        with pytest.raises(ValueError, match="fixed at 3 rows, and 4"):
            buffer.append(torch.zeros(2, 1))
        with pytest.raises(RuntimeError, match="before the first row"):
            buffer.fix(9)
