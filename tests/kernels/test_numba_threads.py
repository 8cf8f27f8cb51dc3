"""When one thread more pays: where idle threads sleep, more work."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from sparseattn.kernels import numba_threads
from sparseattn.utils import idle_threads


@pytest.mark.parametrize(("policy", "layers", "expected"), [
    ("", ["nothing", "omp"], True),
    ("ACTIVE", ["omp", "workqueue"], True),
    ("Passive", ["omp"], False),
    ("", ["workqueue", "omp"], False),
    ("", ["nothing"], False),
])  # fmt: skip
def test_threads_of_openmp_spin_unless_told_to_sleep(
    policy: str, layers: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(numba_threads.numba.config, "THREADING_LAYER", "default")
    monkeypatch.setattr(numba_threads.numba.config, "THREADING_LAYER_PRIORITY", layers)
    if "omp" in layers and expected:
        pytest.importorskip("numba.np.ufunc.omppool")
    assert numba_threads.spins() is expected
    monkeypatch.setattr(numba_threads.numba.config, "THREADING_LAYER", "workqueue")
    assert numba_threads.spins() is False


@pytest.mark.parametrize(
    ("policy", "turns", "expected"),
    [("", "", True), ("active", "", True), ("Passive", "", False), ("", "0", False), ("passive", "1000", True)],
)
def test_the_environment_says_whether_idle_threads_spin(
    policy: str, turns: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setenv("GOMP_SPINCOUNT", turns)
    assert idle_threads.spin() is expected
