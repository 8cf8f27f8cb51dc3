"""IndexCache: full layers choose, and each shared layer reads what the nearest full layer before it chose.

https://arxiv.org/abs/2603.12201
"""

from __future__ import annotations

from sparseattn.selectors.base import Selector
from sparseattn.selectors.combined.kascade import NONE, Kascade

FULL, SHARED = "F", "S"


class IndexCache(Kascade):
    """Reads in shared layers the choice of the nearest full layer before, of each KV head that of the same number.

    Args:
        pattern: a letter for each layer of the model, F full or S shared, as engines take it (`index_topk_pattern`),
            such as FSSSFS; or a number n: layers 0 and 1 are full, and every n-th behind these (`index_topk_freq`). The
            first letter is F. Letters of dense layers are ignored, but a shared layer must not have one for its full
            layer: give these an S behind the first layer that chooses. `training.shared_layers` finds patterns.
        inner: what full layers choose by; by default one list for all heads, since the paper's index has one.

    The paper shares the index of models that were trained with one (DeepSeek Sparse Attention); here any method of
    `Kascade` is shared, in a model as it is. Its training of an index for several layers is left out. Facts are from
    the authors' patches for engines (THUDM/IndexCache, `indexcache.patch`), its README and abstract.

    Raises:
        ValueError: a pattern of other letters, one that begins with S, or a number below 1; in `check_shape`, a pattern
            of another number of layers.
    """

    def __init__(self, pattern: int | str = 4, inner: Selector | str = "exact:group=layer") -> None:
        super().__init__(NONE, [0], inner)
        if isinstance(pattern, str):
            if not pattern.startswith(FULL) or set(pattern) - {FULL, SHARED}:
                raise ValueError(f"pattern has a letter for each layer, F or S, and begins with F, got {pattern!r}")
        elif isinstance(pattern, bool) or pattern < 1:
            raise ValueError(f"pattern is letters, such as FSSF, or every how many layers are full, got {pattern}")
        self.pattern = pattern

    def chosen_anchors(self) -> list[int]:
        """Return the full layers; with a number, those up to this layer."""
        if isinstance(self.pattern, int):
            return [0, *range(1, self.layer + 1, self.pattern)]
        return [layer for layer, letter in enumerate(self.pattern) if letter == FULL]

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        depth = self.layer_context.depth
        if isinstance(self.pattern, str) and (depth or self.layer + 1) > len(self.pattern):
            raise ValueError(
                f"{self} has letters for {len(self.pattern)} layers, and the model has {depth or self.layer + 1}"
            )
        super().check_shape(heads, group, size)
