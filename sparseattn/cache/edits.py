"""What is done to a cache between steps: rows dropped, freed, reordered, copied, moved, saved and loaded."""

from __future__ import annotations

import copy
import os
from typing import TypeVar

import torch
from torch import Tensor

from sparseattn.cache import input_checks, prompt_files
from sparseattn.cache.ranks import Ranks
from sparseattn.cache.rows import StoredRows
from sparseattn.cache.search import Search
from sparseattn.cache.shown_rows import ShownRows
from sparseattn.cache.token_store import TokenStore
from sparseattn.codecs.base import RowCodec
from sparseattn.selectors.base import Selector
from sparseattn.utils.inference_mode import keeps_tensors

Cache = TypeVar("Cache", bound="CacheEdits")


class CacheEdits:
    """The part of `KVCache` that no step runs."""

    selector: Selector
    stored: StoredRows
    search: Search
    codec: RowCodec | None
    ranks: Ranks | None
    sealed_device: torch.device | None
    fixed: bool
    sink: int
    window: int
    seal_rows: int
    _shown: ShownRows
    _tokens: TokenStore
    _decoded: bool

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first append."""
        return len(self.stored.zones.count)

    @keeps_tensors
    def compact(self) -> int:
        """Free the rows that the selector has dropped: those of each head that are left move together.

        The sealed zone shrinks to the most rows that any head holds, in whole units of the selector, so that memory
        falls as far as the fullest head allows; copying them takes as much memory again for the moment. Nothing that
        is decoded changes, but the rows are gone: what compares with full attention needs them, so that comparisons
        (`evaluate`, `bench`, `eval`) never call it. Call it after the prefill, or now and then.

        Returns:
            Places of each head that were freed; 0 where there were none to free.

        Raises:
            ValueError: a selector that does not evict or cannot follow (`FollowsMoves`), a `fixed` cache, or one
                whose rows a codec keeps.
        """
        self.stored.require()
        input_checks.check_compactable(self.selector, self.fixed, self.codec)
        self.search.note_dropped()
        if (ids := self.stored.places_left(self.selector.unit)) is None:
            return 0
        before = self.stored.zones.zone
        self.stored.broken = f"{self.selector!r} failed while rows were sealed or freed"
        for part in self.search.abilities.followers:
            part.keep(ids)
        self._let_go()
        self.stored.compact(ids)
        self.stored.broken = ""
        self.search.forget()  # places that are others' now
        self._shown.refresh()
        return before - self.stored.zones.zone

    @keeps_tensors
    def crop(self, drop: int | Tensor) -> None:
        """Forget the newest rows of every sequence, as speculative decoding does with rejected tokens.

        Args:
            drop: rows, an int for all sequences or integers `[B]`.

        Raises:
            ValueError: `drop` is neither, or reaches into sealed rows, which never change: construct the cache with a
                larger `rollback`.
        """
        self.stored.crop(self._dropped(drop))
        self.search.lookahead = None  # of a token that is gone
        self._shown.refresh()

    def check_crop(self, drop: int | Tensor) -> None:
        """Raise what `crop` would, and change nothing."""
        self.stored.check_crop(self._dropped(drop))

    def _let_go(self) -> None:
        """Keep nothing that holds storage which is about to be replaced, as much memory as the rows take."""
        self._tokens.let_go()
        self.search.let_go()

    def _dropped(self, drop: int | Tensor) -> list[int]:
        self.stored.require()
        input_checks.check_repeatable(self.stored.keys.full, "dropping rows")
        return input_checks.checked_drop(drop, self.batch)

    @keeps_tensors
    def reorder(self, index: Tensor) -> None:
        """Let sequence b become what sequence `index[b]` was (beam search); `index` `[B']` may repeat and omit.

        ValueError for another `index`, or where the storage is `fixed` and B' is not B.
        """
        self.stored.require()
        input_checks.check_repeatable(self.stored.keys.full, "reordering sequences")
        input_checks.check_indices(index, self.batch)
        self._let_go()
        self.stored.take(index)
        self.search.lookahead = None  # of sequences as they were
        self.selector.reorder(index if self.sealed_device is None else index.to(self.sealed_device))
        self._shown.refresh()

    @keeps_tensors
    def clone(self: Cache) -> Cache:
        """Return an independent copy, selector included."""
        twin = copy.copy(self)
        twin.selector, twin.stored = self.selector.clone(), self.stored.clone()
        twin._tokens = TokenStore(twin.stored)
        twin.search = self.search.of(twin.selector, twin.stored)
        twin._shown = ShownRows(twin.selector, twin.search.abilities, twin.stored, self._shown.indexes)
        if self.batch:
            twin._shown.claim()
            twin._shown.refresh()
        return twin

    def reset(self) -> None:
        """Forget every row, the selector's too, and free the storage unless it is fixed; the configuration stays."""
        self._let_go()
        self.stored.reset()
        self.selector.reset()
        self.search.forget()
        self.search.lookahead = None
        self._shown.forget()
        self._decoded = False

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that it holds, the selector's index too, to a prompt cache that `load` takes up (safetensors, whole
        or not at all; for the moment as much memory again).

        Raises:
            ValueError: an index that is not in tensors (faiss's), or a file that cannot be written.
        """
        prompt_files.save(self, path)

    @keeps_tensors
    def load(self: Cache, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Cache:
        """Take up what `save` wrote, into this cache, which is empty, and return it: what follows is decoded as it
        would have been there. Settings that are not compared (capacity, devices, `rollback`, a `knob`) may differ.

        Rows decide what a model says, as weights do: load files that you trust.

        Args:
            device: the cache's own, where later rows come; sealed ones go to `sealed_device` if there is one.

        Raises:
            ValueError: a file that is damaged, or of another selector, index, layer, RoPE, sink, window, seal or codec.
                The cache stays empty.
        """
        prompt_files.load(self, path, device)
        return self

    def resume(self, begun: bool) -> None:
        """Serve the rows that a file has put into it; `begun`: whether the first seal has been."""
        keys = self.stored.sealed_keys if self.stored.zones.apart else self.stored.keys.full
        self.selector.resume(keys[:, :, :0])
        self._decoded = begun
        self._shown.claim()
        self.stored.publish()
        self._shown.refresh()

    @property
    def begun(self) -> bool:
        """Whether the first seal has been, or its time has."""
        return self._decoded

    @keeps_tensors
    def to(self: Cache, device: torch.device | str) -> Cache:
        """Move storage and selector, and return the cache; what lies on `sealed_device` stays there.

        Raises:
            ValueError: a selector that works in host memory only, and no `sealed_device`.
        """
        input_checks.check_reachable(self.selector, torch.device(device), self.sealed_device)
        self._let_go()
        self.stored.to(device)
        if self.sealed_device is None:
            self.selector.to(device)
        if self.batch:
            self._shown.refresh()
        return self
