"""`--above auto`: which length follows from measured steps, and what a next start finds of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseattn.serving.vllm.above import AUTO, GAIN, Timed, lengths, pays_above, remember, remembered, said
from sparseattn.serving.vllm.settings import parse

GIVEN = {"selector": "quest", "budget": 2048}


def timed(*shares: float) -> list[Timed]:
    """Steps that take such shares of stock's time, at lengths that double."""
    return [Timed(1024 << i, 1.0 + i, share * (1.0 + i)) for i, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("shares", "above"),
    [
        ((0.5, 0.4, 0.3), 1023),
        ((1.2, 0.9, 0.3), 2047),
        ((0.9, 1.2, 0.3), 4095),  # a length that pays below one that does not was chance
        ((0.5, 0.4, 1.0), 9000),
        ((1.2, 1.1, GAIN + 0.01), 9000),  # not faster beyond what timings vary by
    ],
)
def test_sequences_are_sparse_from_where_every_measured_length_pays(shares: tuple[float, ...], above: int) -> None:
    steps = timed(*shares)
    assert pays_above(steps, 9000) == pays_above(steps[::-1], 9000) == above
    ends = (
        "No sequence of this engine gains, so that all stay dense"
        if above == 9000
        else f"Sequences of {above + 1:,} rows and more are sparse"
    )
    assert ends in said(steps, above, 9000)


def test_lengths_are_those_of_the_engine_at_which_rows_are_left_out() -> None:
    assert lengths(2148, 131072) == [3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768]
    assert lengths(0, 5000) == [1024, 1536, 2048, 3072, 4096]
    assert lengths(2148, 2500) == [2500]


def test_times_are_kept_for_such_an_engine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path))
    what, steps = {"threads": 2, "shape": [4, 2]}, timed(1.0, 0.5)
    assert remembered(what) is None
    remember(what, steps)
    assert remembered({"shape": [4, 2], "threads": 2}) == steps
    assert remembered({**what, "threads": 4}) is None
    (path,) = tmp_path.rglob("*.json")
    for damaged in ("", '{"timed": []}', path.read_text()[:-9], '{"timed": [{"rows": 0, "stock": 1, "sparse": 1}]}'):
        path.write_text(damaged)
        assert remembered(what) is None, damaged  # and is measured again


def test_settings_say_auto_where_the_engine_measures() -> None:
    settings = parse({**GIVEN, "above": AUTO})
    assert settings.measured
    assert settings.to_dict()["above"] == AUTO
    assert parse(settings.to_dict()) == settings
    assert parse({**GIVEN, "above": 100}).to_dict()["above"] == 100
    with pytest.raises(ValueError, match="above is rows or \"auto\", got 'soon'"):
        parse({**GIVEN, "above": "soon"})
    with pytest.raises(ValueError, match="has no setting 'measured'"):
        parse({**GIVEN, "measured": True})
