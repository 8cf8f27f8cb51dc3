"""Rope: against the definition with complex numbers, and its inverse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparseattn.core.rope import Rope


def by_definition(rope: Rope, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Each pair as a complex number times `scaling * exp(i * position * frequency)`, in float64."""
    r = rope.rotated
    part = x[..., :r].double()
    a, b = (part[..., ::2], part[..., 1::2]) if rope.interleaved else (part[..., : r // 2], part[..., r // 2 :])
    angle = (positions.float()[..., None] * rope.inv_freq).double()
    turned = torch.complex(a, b) * torch.polar(torch.full_like(angle, rope.scaling), angle)
    out = x.double().clone()
    if rope.interleaved:
        out[..., :r:2], out[..., 1:r:2] = turned.real, turned.imag
    else:
        out[..., : r // 2], out[..., r // 2 : r] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "rotated"), [(16, 16), (80, 32), (6, 2)])
@pytest.mark.parametrize("scaling", [1.0, 1.37])
def test_rotate_is_the_definition_and_unrotate_its_inverse(
    interleaved: bool, size: int, rotated: int, scaling: float
) -> None:
    rope = Rope(Rope.of(rotated).inv_freq, scaling, interleaved)
    x = torch.randn(2, 3, 63, size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(63) * 2081  # up to 129,022
    turned = rope.rotate(x, positions)
    torch.testing.assert_close(turned.double(), by_definition(rope, x, positions), rtol=0, atol=1e-5)
    assert torch.equal(turned[..., rotated:], x[..., rotated:])
    torch.testing.assert_close(rope.unrotate(turned, positions), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    rope = Rope.of(32)
    x = torch.randn(5, 100, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    positions = torch.arange(100) + 50_000
    turned = rope.rotate(x, positions)
    assert turned.dtype == dtype
    assert torch.equal(turned, rope.rotate(x.float(), positions).to(dtype))


def test_double_precision_is_kept() -> None:
    rope = Rope(Rope.of(32).inv_freq, 1.37)
    x = torch.randn(5, 100, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(100) + 50_000
    turned = rope.rotate(x, positions)
    torch.testing.assert_close(turned, by_definition(rope, x, positions), rtol=0, atol=1e-13)
    torch.testing.assert_close(rope.unrotate(turned, positions), x, rtol=0, atol=1e-13)


def test_positions_broadcast() -> None:
    rope = Rope.of(8)
    x = torch.randn(2, 3, 5, 8)
    positions = torch.stack([torch.arange(5), torch.arange(5) + 7])  # [B,T]
    together = rope.rotate(x, positions[:, None])
    for b in range(2):
        assert torch.equal(together[b], rope.rotate(x[b], positions[b]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_turned_vector_is_taken_off_in_place(interleaved: bool) -> None:
    rope = Rope(Rope.of(8).inv_freq, 1.37, interleaved)  # `turn` leaves the scaling out
    x, vector = torch.randn(2, 3, 5, 12), torch.randn(2, 3, 12)
    positions = torch.stack([torch.arange(5), torch.arange(5) + 7])[:, None]  # [B,1,T]
    wanted = x - rope.turn(vector[:, :, None].expand_as(x), positions)
    rope.take_off(x, vector, positions)
    torch.testing.assert_close(x, wanted)


def test_scores_depend_on_distance_alone() -> None:
    rope = Rope.of(64)
    q, k = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(2))
    near = rope.rotate(q, torch.tensor([40])) @ rope.rotate(k, torch.tensor([3])).T
    far = rope.rotate(q, torch.tensor([1040])) @ rope.rotate(k, torch.tensor([1003])).T
    torch.testing.assert_close(near, far, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Rope(torch.ones(4, dtype=torch.float64)), r"float32 vector \[R/2\], got torch.float64 \[4\]"),
        (lambda: Rope(torch.tensor([1.0, torch.nan])), r"inv_freq is finite, got \[1.0, nan\]"),
        (lambda: Rope(torch.ones(4), 0.0), "scaling is positive and finite, got 0"),
        (lambda: Rope(torch.ones(4), float("nan")), "scaling is positive and finite"),
        (lambda: Rope(torch.ones(4), float("inf")), "scaling is positive and finite"),
        (lambda: Rope(torch.ones(4), "1"), "scaling is positive and finite"),
        (lambda: Rope(torch.ones(4), interleaved=1), "interleaved is True or False, got 1"),
        (lambda: Rope.of(8, 0.0), "theta is positive and finite, got 0.0"),
        (lambda: Rope.of(8, -1.0), "theta is positive and finite, got -1.0"),
        (lambda: Rope.of(8, float("inf")), "theta is positive and finite, got inf"),
        (lambda: Rope.of(8, float("nan")), "theta is positive and finite, got nan"),
        (lambda: Rope.of(7), "even, got 7"),
        (lambda: Rope.of(8).rotate(torch.ones(1, 6), torch.tensor([0])), "rotates 8 dimensions, the vectors have 6"),
    ],
)
def test_errors_are_sentences(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
