"""What methods share whose parameters are a calibration's, or this prompt's where no file is named."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors.base import LayerContext, Rows
from sparseattn.selectors.checks import known_rope, warn_of_keys_as_queries
from sparseattn.selectors.identity import identity
from sparseattn.selectors.parameters.channel_calibration import METHODS, Calibration, CalibrationError, shared
from sparseattn.selectors.tokens.base import LEARNED_HERE, Ranked
from sparseattn.utils.hashing import file_hash

PROMPT = "prompt"  # stands for a calibration by this prompt alone


class FromCalibration(Ranked):
    """Has its parameters from a file where one is named; its constructor calls `read_from`.

    Raises:
        ValueError: in `read_from`, a file that is not there or is of another method; in `for_layer`, a layer that it
            lacks; in `append`, one of another shape or RoPE.
    """

    method: str  # in a calibration
    without_rope = "take keys as they are, before=False"  # what to do where a layer's RoPE is not known
    late: tuple[str, ...] = ("_held", "_turns")
    artefact: str
    roped: bool

    def read_from(self, artefact: str, roped: bool = True) -> None:
        """Take parameters from a file of `sparseattn train`, or from "prompt".

        Args:
            roped: whether they are of keys after RoPE, not before it.
        """
        self.artefact, self.roped = artefact, roped
        self._held: Calibration | None = None
        self._turns: Rope | None = None  # the layer's, on the device of the rows
        if artefact != PROMPT:
            self.calibration()

    def calibration(self) -> Calibration:
        """Return the file, read once for all layers; ValueError where it is none of this method."""
        if self._held is None:
            calibration = shared(self.artefact)
            if calibration.method != self.method:
                raise CalibrationError(
                    f"{self.artefact} is a calibration for {calibration.method}, and {identity(type(self))} needs one "
                    f"for {self.method}: sparseattn train --method {self.method}"
                )
            if calibration.roped != self.roped:
                kept, wanted = ("after", "before") if calibration.roped else ("before", "after")
                raise CalibrationError(
                    f"{self.artefact} is of keys {kept} RoPE, and {identity(type(self))} takes them {wanted} it"
                )
            self._held = calibration
        return self._held

    def bind(self, context: LayerContext) -> None:
        super().bind(context)
        self._turns = None
        if self.artefact != PROMPT:
            self.calibration().holds(context.layer)

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        if self.artefact != PROMPT:
            self.calibration().check(self.layer, self._every(heads), size, self.layer_context.rope)
        elif not self.roped:
            self._rope()
        if not self.roped and (rope := self.layer_context.rope) is not None:
            rope.check_size(size)

    def why_not_compared(self) -> str | None:
        return LEARNED_HERE if self.artefact == PROMPT else None

    def _every(self, heads: int) -> int:
        """KV heads of the layer, of which it is shown `heads`."""
        return heads if self.layer_context.heads is None else self.layer_context.heads.of

    def _rope_on(self, device: torch.device) -> Rope:
        """Return `_rope` with its frequencies on a device, moved once: a step must not wait for a copy."""
        if self._turns is None or self._turns.inv_freq.device != device:
            self._turns = self._rope().to(device)
        return self._turns

    def _rope(self) -> Rope:
        """Return what takes RoPE back from keys; ValueError where it is not known."""
        return known_rope(self, self.layer_context, "takes RoPE back from keys", self.without_rope)

    def index_arguments(self) -> dict[str, Any]:
        """Of a file its content counts, wherever it lies."""
        given = super().index_arguments()
        return given if self.artefact == PROMPT else given | {"artefact": file_hash(self.artefact)}

    def source(self) -> str:
        return super().source() + ("" if self.artefact == PROMPT else f" {file_hash(self.artefact)[:16]}")

    def filed(self, keys: Tensor) -> dict[str, Tensor]:
        """Return the file's parameters of this layer's heads for keys `[H,n,D]`, on their device."""
        parameters = self.calibration().check(
            self.layer, self._every(len(keys)), keys.shape[2], self.layer_context.rope
        )
        own = list(self.head_numbers(len(keys)))
        return {name: part[own].to(keys.device) for name, part in parameters.items()}


class Calibrated(FromCalibration):
    """Keeps something short of every key, by parameters that a calibration gives.

    Args:
        artefact: a file of `sparseattn train`; "prompt" (default): the parameters are taken from the first rows
            that a sequence seals, its prompt's, and not changed by those sealed later.
        group: how a query group votes, see `vote`.
        roped: whether the parameters are of keys after RoPE, not before it.

    Raises:
        ValueError: see `FromCalibration`.
    """

    def __init__(self, artefact: str, group: str, roped: bool = True) -> None:
        super().__init__(group)
        self.known = RowBuffer(1)
        self.read_from(artefact, roped)

    @abstractmethod
    def taken(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of a layer's parameters (`channel_calibration`), what the row buffers of their names hold: `[H,..]`."""

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        keys, positions = rows.keys[0], rows.positions[0]
        if self.artefact != PROMPT:
            return self.taken(self.filed(keys))
        if not self.roped:
            keys = self._rope_on(keys.device).unrotate(keys.float(), positions)
        queries: Tensor | None = None
        if METHODS[self.method].queries:
            if rows.queries is None or rows.query_positions is None or not rows.query_positions.numel():
                warn_of_keys_as_queries(self, len(keys), len(keys))
                queries = keys[:, None]
            else:
                queries, keys = rows.queries[0], keys[:, torch.searchsorted(positions, rows.query_positions[0])]
        return self.taken(METHODS[self.method].of(keys, queries))
