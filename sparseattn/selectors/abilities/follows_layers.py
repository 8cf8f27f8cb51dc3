"""Methods that read what another layer of the model chose."""

from __future__ import annotations


class FollowsLayers:
    """A method that reads in some layers what another layer chose at the same step (`LayerContext.board`)."""

    @property
    def follows(self) -> int | None:
        """The layer whose choice it reads; None where it chooses itself."""
        return None
