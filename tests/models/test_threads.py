"""Threads that share a model, a SparseCache each: every one decodes as it would alone, or is refused by name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from sparseattn import Quest  # noqa: E402
from sparseattn.models.capture import capture  # noqa: E402
from sparseattn.models.load import ModelError, reference_model  # noqa: E402
from sparseattn.models.sparse_cache import SparseCache, restore  # noqa: E402
from sparseattn.models.sparse_layer import SparseLayer  # noqa: E402
from tests import ROOT  # noqa: E402
from tests.models.tiny import SMALL, added, plain, prompt, small  # noqa: E402

README = ROOT / "README.md"


@pytest.fixture
def llama() -> Any:
    return small("llama")


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Threads take turns every few calls."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """`work` of each number, in a thread each; raises what one of them raised."""
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def side_by_side(model: Any, prompts: list[Tensor], times: int, new: int, **settings: Any) -> None:
    """Every prompt in a thread of its own, so many times, a cache for each: the tokens are those of one thread."""
    expected = []
    for ids in prompts:
        with SparseCache(model, **settings) as cache:
            expected.append(added(model, cache, ids, new))
    calls = cache.stats().sparse_calls

    def work(number: int) -> None:
        for _ in range(times):
            with SparseCache(model, **settings) as own:
                assert added(model, own, prompts[number], new) == expected[number]
                assert own.stats().sparse_calls == calls > 0

    in_threads(len(prompts), work)
    assert model.config._attn_implementation == "sdpa", "the last to leave has given the model back"
    with SparseCache(model, **settings) as cache:
        assert added(model, cache, prompts[0], new) == expected[0]


@pytest.mark.parametrize("selector", ["quest:page=4", "exact", "pqcache:subspaces=2,bits=4"])
def test_threads_decode_as_one_does(llama: Any, selector: str) -> None:
    prompts = [prompt(40 + 10 * number, seed=number) for number in range(3)]
    side_by_side(llama, prompts, 2, 6, selector=selector, budget=8, **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 4, 8])
def test_threads_of_the_byte_model_decode_a_hundred_times_as_one_does(threads: int) -> None:
    text = torch.tensor([list(README.read_bytes())])
    prompts = [text[:, 100 * number : 100 * number + 900] for number in range(threads)]
    side_by_side(reference_model(), prompts, 100, 8, selector="quest", budget=128)


def test_caches_made_once_serve_many_turns_in_threads_of_their_own(llama: Any) -> None:
    prompts = [prompt(40 + 10 * number, seed=number) for number in range(3)]
    settings = {"selector": Quest(4), "budget": 8, **SMALL}
    expected = [added(llama, SparseCache(llama, **settings), ids) for ids in prompts]
    caches = [SparseCache(llama, **settings) for _ in prompts]

    def work(number: int) -> None:
        for _ in range(3):
            caches[number].reset()
            assert added(llama, caches[number], prompts[number]) == expected[number]

    in_threads(3, work)


def test_a_dense_call_changes_nothing_that_threads_share(llama: Any) -> None:
    """Flash attention reads its name in the config: it finds it there, and nobody else does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    seen = []

    def flash(module: Any, *args: Any, **options: Any) -> Any:
        shared = {part.config._attn_implementation for part in llama.modules() if hasattr(part, "config")}
        seen.append((module.config._attn_implementation, shared, module.q_proj is attention.q_proj))
        return sdpa_attention_forward(module, *args, **options)

    transformers.AttentionInterface.register("flash_spy", flash)
    transformers.AttentionMaskInterface.register("flash_spy", sdpa_mask)
    attention = llama.model.layers[0].self_attn
    expected = added(llama, plain(llama), prompt())
    llama.config._attn_implementation_internal = "flash_spy"
    with SparseCache(llama, Quest(4), None, **SMALL, dense_layers=[1, 2]) as cache:
        seen.clear()
        assert added(llama, cache, prompt()) == expected
        assert {name for name, _, _ in seen} == {"flash_spy"}
        assert all(shared == {"sparseattn_sparse_flash_spy"} for _, shared, _ in seen)
        assert any(same for _, _, same in seen), "the layer's own weights"


class Halt:
    """Stops a pass of one thread in the middle of layer 1, until it is told to go on."""

    def __init__(self, model: Any) -> None:
        self.there, self.on = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self.failed: BaseException | None = None
        self.handle = model.model.layers[1].mlp.register_forward_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        if threading.current_thread() is self.thread and not self.there.is_set():
            self.there.set()
            assert self.on.wait(60)

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.failed = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert self.there.wait(60)

    def go_on(self) -> None:
        self.on.set()
        assert self.thread is not None
        self.thread.join()
        self.handle.remove()


def test_a_cache_serves_one_thread_at_a_time(llama: Any) -> None:
    cache, found = SparseCache(llama, Quest(4), 8, **SMALL), []
    expected = added(llama, SparseCache(llama, Quest(4), 8, **SMALL), prompt())
    halt = Halt(llama)
    halt.start(lambda: found.append(added(llama, cache, prompt())))
    with pytest.raises(RuntimeError, match="in a forward pass of another thread: give each thread a SparseCache of"):
        added(llama, cache, prompt())
    halt.go_on()
    assert (found, halt.failed) == ([expected], None)


def test_a_pass_whose_model_is_given_back_ends_with_an_error(llama: Any) -> None:
    cache = SparseCache(llama, Quest(4), 8, **SMALL)
    halt = Halt(llama)
    halt.start(lambda: added(llama, cache, prompt()))
    restore(llama)
    halt.go_on()
    with pytest.raises(RuntimeError, match="has its own attention back"):
        raise halt.failed or AssertionError("it went on")
    assert added(llama, plain(llama), prompt()) == added(small("llama"), plain(llama), prompt())


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("how", ["restore", "set"])
def test_attention_that_goes_past_the_cache_gives_no_tokens(
    llama: Any, monkeypatch: pytest.MonkeyPatch, how: str, decoding: bool
) -> None:
    """The model changes between a layer's update and its attention call, as another thread can do."""
    update, calls = SparseLayer.update, []

    def changed(self: SparseLayer, *args: Any, **options: Any) -> Any:
        out = update(self, *args, **options)
        calls.append(self)
        if len(calls) == (4 if decoding else 3):
            restore(llama) if how == "restore" else llama.set_attn_implementation("eager")
        return out

    cache = SparseCache(llama, Quest(4), 8, **SMALL)
    monkeypatch.setattr(SparseLayer, "update", changed)
    words = (
        "has its own attention back" if decoding and how == "restore" else "took its attention past this SparseCache"
    )
    with pytest.raises(RuntimeError, match=words):
        added(llama, cache, prompt())
    assert len(calls) < 7, "no second token"


def test_a_layer_whose_rows_were_never_attended_takes_no_more(llama: Any) -> None:
    from sparseattn.models.sparse_layer import RUNNING, Run

    cache = SparseCache(llama, Quest(4), 8, **SMALL)
    rows = torch.randn(2, 1, 2, 5, 16)
    before = RUNNING.get()
    RUNNING.set(Run(cache, "sdpa", 0, None))
    try:
        cache.update(*rows, 1)
        with pytest.raises(RuntimeError, match=r"never attended to.*crop\(0\), or make a new one"):
            cache.update(*rows, 1)
    finally:
        RUNNING.set(before)
    with pytest.raises(RuntimeError, match="outside a pass"):
        llama.model.layers[0].self_attn(torch.randn(1, 2, 64), position_embeddings=(torch.ones(1, 2, 16),) * 2)


def test_the_last_thread_to_leave_gives_the_model_back(llama: Any) -> None:
    expected = added(llama, SparseCache(llama, Quest(4), 8, **SMALL), prompt())
    restore(llama)
    found, entered, left = [], threading.Event(), threading.Event()

    def work() -> None:
        with SparseCache(llama, Quest(4), 8, **SMALL) as own:
            entered.set()
            assert left.wait(60)
            found.append(added(llama, own, prompt()))

    with SparseCache(llama, Quest(4), 8, **SMALL) as first:
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(60)
    assert llama.config._attn_implementation == "sparseattn_sparse_sdpa"
    with pytest.raises(ValueError, match="no selector is called"):
        SparseCache(llama, "qest")  # one that fails beside it leaves the model to the other thread
    assert added(llama, first, prompt()) == expected
    left.set()
    thread.join()
    assert found == [expected]
    assert llama.config._attn_implementation == "sdpa"
    assert added(llama, plain(llama), prompt())


def test_a_model_that_others_run_as_it_is_can_be_looked_at(llama: Any, tmp_path: Path) -> None:
    """A pass with the model's own attention that another thread has begun stays right while the model is prepared,
    captured and given back, and does not get into what is found."""
    expected, found = added(llama, plain(llama), prompt()), []
    alone = capture(llama, prompt(), tmp_path / "alone", chunk=20)
    halt = Halt(llama)
    halt.start(lambda: found.append(added(llama, plain(llama), prompt())))
    with SparseCache(llama, Quest(4), 8, **SMALL) as cache:
        ropes = [layer.rope for layer in cache.prepared.layers.values()]
    assert all(rope is not None for rope in ropes)

    def during(done: int, total: int) -> None:
        if not halt.on.is_set():
            halt.go_on()
        with pytest.raises(ModelError, match="this model is being captured already"):
            SparseCache(llama)

    trace = capture(llama, prompt(), tmp_path / "beside", chunk=20, progress=during)
    assert (found, halt.failed) == ([expected], None)
    assert all(torch.equal(trace.layer(i).keys, alone.layer(i).keys) for i in range(3))
    assert trace.meta["rope_absent"] == alone.meta["rope_absent"] == {}


def test_threads_that_prepare_a_model_at_once_find_one_preparation(llama: Any) -> None:
    made: list[SparseCache] = []
    in_threads(4, lambda number: made.append(SparseCache(llama, Quest(4), 8, **SMALL)))
    assert len({id(cache.prepared) for cache in made}) == 1
    assert len({tuple(added(llama, cache, prompt())) for cache in made}) == 1
