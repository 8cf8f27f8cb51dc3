"""Pages by their mean key and a few directions: how an entry is made and scored. In torch, which is the specification.

An entry holds the mean key of a page, r directions along which its keys differ most (the principal ones, from the Gram
matrix of the page's rows) and, for `Form.kind` "clse", where its rows lie along them. A query's products with mean and
directions make a score, see `estimates`. What they are kept in, 16, 8 or 4 bits, is read as it is by compiled code.
The idea and the forms "quad" and "clse" are amass-kv's, https://pypi.org/project/amass-kv/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.kernels.encode_keys.levels import nearest, rounded
from sparseattn.kernels.group_vote.reference import vote

KINDS = ("quad", "clse", "ellipsoid")
BITS = (16, 8, 4)
TINY = 1e-12  # of a page's variance, below which a direction has none

Parts = Mapping[str, Tensor]  # an entry's tensors by name, see `Form.names`


@dataclass(frozen=True)
class Form:
    """What an entry is made of and how it scores.

    Args:
        kind: "quad", "clse" or "ellipsoid", see `estimates`.
        page: rows of a page.
        rank: directions r; 0: the mean alone.
        bits: of a number of a direction and of a coordinate, 16, 8 or 4. The mean has 16, and 8 where these have fewer.
        rest: whether the variance along other directions counts, as if it were the same along each of them.
        deviations: c of "ellipsoid".
    """

    kind: str
    page: int
    rank: int
    bits: int = 16
    rest: bool = False
    deviations: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of an entry, all `[B,H,P,..]`:

        - vectors: the mean, then r directions. D numbers of 16 bits or int8 each; directions of 4 bits take
          `ceil(D/2)` bytes, whose low halves are the first channels and whose high halves the others.
        - numbers, of 16 bits: with codes 1+r steps of the vectors, then those of a page's rows for "clse"; then with
          `rest` the deviation along the other directions.
        - coordinates, of "clse": `r*page`, direction by direction, as the directions are kept.
        """
        numbers = ("numbers",) * (self.bits < 16 or self.rest)
        return "vectors", *numbers, *(("coordinates",) * (self.kind == "clse"))

    @property
    def steps(self) -> int:
        """16-bit numbers before that of the rest."""
        return 0 if self.bits == 16 else 1 + self.rank + (self.page if self.kind == "clse" else 0)


def encode(keys: Tensor, form: Form, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the entries of pages of keys.

    Args:
        keys: `[B,H,P*page,D]`.
        dtype: of what is kept in 16 bits.

    Returns:
        name -> `[B,H,P,..]`, see `Form.names`.
    """
    rows = keys.float().unflatten(2, (-1, form.page))  # [B,H,P,page,D]
    mean = rows.mean(3)
    away = rows - mean[:, :, :, None]
    directions, deviation, rest = principal(away, form.rank)
    coordinates = (directions @ away.mT).mT  # [B,H,P,page,r]
    if form.kind != "clse":  # along a direction of that length a product is a deviation of logits
        other = rest[..., None] if form.rest else 0.0
        directions = directions * (deviation.square() - other**2).clamp(min=0).sqrt()[..., None]
    parts = _in_codes if form.bits < 16 else _in_floats
    vectors, numbers, codes = parts(mean[:, :, :, None], directions, coordinates, form, dtype)
    if form.rest:
        numbers.append(nearest(rest[..., None], dtype))
    made = {"vectors": vectors}
    if numbers:
        made["numbers"] = torch.cat(numbers, -1)
    if form.kind == "clse":
        made["coordinates"] = codes
    return made


def _in_floats(
    mean: Tensor, directions: Tensor, coordinates: Tensor, form: Form, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], Tensor]:
    """vectors, numbers and coordinates of 16 bits."""
    vectors = nearest(torch.cat([mean, directions], 3), dtype)
    return vectors.flatten(3), [], nearest(coordinates, dtype).mT.flatten(3)


def _in_codes(
    mean: Tensor, directions: Tensor, coordinates: Tensor, form: Form, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], Tensor]:
    """vectors, numbers and coordinates of 8 bits, all but the mean of 4 where the form says so."""
    last = (1 << form.bits - 1) - 1
    codes_of_mean, step = _coded(mean, 127, dtype)
    others, steps = _coded(directions, last, dtype)
    numbers = [step, steps]
    codes = coordinates
    if form.kind == "clse":
        codes, of_rows = _coded(coordinates, last, dtype)
        numbers.append(of_rows)
    codes = codes.mT.flatten(3)
    if form.bits == 4:
        others, codes = _halved(others), _halved(codes) if form.kind == "clse" else codes
    return torch.cat([codes_of_mean.flatten(3), others.flatten(3)], -1), numbers, codes


def principal(away: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the directions along which rows differ most from their mean.

    Args:
        away: `[..,page,D]` float32, rows less their mean.
        rank: r.

    Returns:
        `[..,r,D]`, of length 1, or 0 where rows do not differ along so many; the deviation of the rows along each,
        `[..,r]`; and that along each of the other D - r directions if it were the same, `[..]`. The row that is
        farthest along a direction is on its positive side.
    """
    page, size = away.shape[-2:]
    gram = away @ away.mT  # [..,page,page], whose eigenvectors are those of the covariance, by row
    squares, along = torch.linalg.eigh(gram)
    squares = squares[..., page - rank :].flip(-1).clamp(min=0)  # [..,r], sums over the rows
    along = along[..., page - rank :].flip(-1)  # [..,page,r]
    farthest = along.gather(-2, along.abs().argmax(-2, keepdim=True))
    along = along * torch.where(farthest < 0, -1.0, 1.0)
    whole = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    there = squares > TINY * whole[..., None]
    lengths = torch.where(there, squares, 1.0).sqrt()
    directions = (along.mT @ away) / lengths[..., None] * there[..., None]
    left = (whole - squares.sum(-1)).clamp(min=0) / (page * max(size - rank, 1))
    return directions, (squares * there / page).sqrt(), (left * (size > rank)).sqrt()


def _coded(numbers: Tensor, last: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """int8 codes from `-last` to `last` of `[..,n]` in steps of one size, `[..]`, of a 16-bit dtype."""
    step = rounded(numbers.abs().amax(-1) / last, dtype, up=True)
    codes = numbers / torch.where(step > 0, step.float(), 1.0)[..., None]
    return codes.round().clamp(-last, last).to(torch.int8), step


def _halved(codes: Tensor) -> Tensor:
    """Codes of 4 bits `[..,n]`, two to a byte: `[..,ceil(n/2)]` int8, the first half of them in the low bits."""
    half = -(-codes.shape[-1] // 2)
    codes = torch.nn.functional.pad(codes, (0, 2 * half - codes.shape[-1])).to(torch.int16)
    packed = (codes[..., :half] & 15) | (codes[..., half:] & 15) << 4
    return (packed - 256 * (packed > 127)).to(torch.int8)


def _unhalved(packed: Tensor, size: int) -> Tensor:
    """Codes `[..,size]` of `_halved`'s bytes."""
    wide = packed.to(torch.int16)
    return torch.cat([((wide & 15) ^ 8) - 8, wide >> 4], -1)[..., :size]


def decode(entries: Parts, form: Form, size: int, wide: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what entries stand for: mean and directions `[B,H,P,1+r,D]`; coordinates `[B,H,P,r,page]` or None; the
    deviation along other directions `[B,H,P]` or None."""
    vectors, coordinates = entries["vectors"], entries.get("coordinates")
    numbers = entries["numbers"].to(wide) if "numbers" in entries else None
    rest = numbers[..., -1] if form.rest and numbers is not None else None
    if form.bits == 4:
        others = _unhalved(vectors[..., size:].unflatten(-1, (form.rank, -1)), size)
        vectors = torch.cat([vectors[..., None, :size].to(torch.int16), others], -2)
        coordinates = None if coordinates is None else _unhalved(coordinates, form.rank * form.page)
    else:
        vectors = vectors.unflatten(-1, (1 + form.rank, size))
    vectors = vectors.to(wide)
    coordinates = None if coordinates is None else coordinates.to(wide).unflatten(-1, (form.rank, form.page))
    if numbers is not None and form.bits < 16:
        vectors = vectors * numbers[..., : 1 + form.rank, None]
        if coordinates is not None:
            coordinates = coordinates * numbers[..., None, 1 + form.rank : form.steps]
    return vectors, coordinates, rest


def estimates(query: Tensor, entries: Parts, form: Form, temperature: float) -> Tensor:
    """Return what pages promise each query head.

    With q the query over the temperature, mu the page's mean, x_k the product of q and direction k, and rho the
    deviation along the other directions, or 0 without `rest`:

    - "quad": `q mu + (sum_k x_k^2 + rho^2 |q|^2) / 2`, the logarithm of the mean of exponentiated logits if these were
      distributed normally. Directions are as long as deviations along them are, less rho (in squares).
    - "ellipsoid": `q mu + c sqrt(sum_k x_k^2 + rho^2 |q|^2)`, the largest logit on the ellipsoid of c deviations.
    - "clse": `q mu + log sum_t exp(sum_k c_tk x_k) + rho^2 (|q|^2 - sum_k x_k^2) / 2`, the page's rows t where they
      lie along directions of length 1, and the others as in "quad".

    Args:
        query: `[B,H,G,D]`.
        entries: name -> `[B,H,P,..]`, see `Form.names`.
        temperature: see `Selector.temperature`.

    Returns:
        `[B,H,G,P]` float32 (float64 of a float64 query).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scaled = query.to(wide) / temperature
    vectors, coordinates, rest = decode(entries, form, query.shape[-1], wide)
    products = (scaled @ vectors.flatten(2, 3).mT).unflatten(-1, (-1, 1 + form.rank))  # [B,H,G,P,1+r]
    mean, along = products[..., 0], products[..., 1:]
    squares = along.square().sum(-1)
    if coordinates is not None:
        logits = (along[..., None, :] @ coordinates[:, :, None])[..., 0, :]  # [B,H,G,P,page]
        estimate = mean + logits.logsumexp(-1)
        if rest is not None:
            left = (scaled.square().sum(-1, keepdim=True) - squares).clamp(min=0)
            estimate = estimate + rest[:, :, None].square() * left / 2
        return estimate
    if rest is not None:
        squares = squares + rest[:, :, None].square() * scaled.square().sum(-1, keepdim=True)
    if form.kind == "ellipsoid":
        return mean + form.deviations * squares.sqrt()
    return mean + squares / 2


def scores(query: Tensor, entries: Parts, valid: Tensor, form: Form, group: str, temperature: float) -> Tensor:
    """As `dispatch.scores`."""
    return vote(estimates(query, entries, form, temperature).masked_fill(~valid[:, None, None], -torch.inf), group)


def scores_at(query: Tensor, store: Parts, table: Tensor, form: Form, group: str, temperature: float) -> Tensor:
    """As `dispatch.scores_at`."""
    place = table.long().clamp(min=0)
    own = {name: part[place].transpose(1, 2) for name, part in store.items()}
    return scores(query, own, table >= 0, form, group, temperature)
