"""Double Sparsity: every row ranked by few channels of its key, always the same ones. https://arxiv.org/abs/2408.07092"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.step_cost import Launch, products
from sparseattn.selectors.abilities import LearnsFromQueries
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_least, check_share, half
from sparseattn.selectors.tokens.calibrated_base import PROMPT, Calibrated


class DoubleSparsity(LearnsFromQueries, Calibrated):
    """Reads the rows with the largest products over the channels that matter most in a KV head.

    Which channels these are is calibrated beforehand: those with the largest mean of `|q_i k_i|`, over tokens whose
    query meets their own key. The label cache keeps these channels of every key, in four bits or two.

    Args:
        channels: of a key that are kept, all of them if there are fewer; 0 (default): a quarter of the head size, its
            code's setting (group factor 4).
        bits: of a kept number: 4 (default, its code's) or 2, in equal steps between a row's least and largest; 16: as
            keys are. The script for AIME that its authors publish has two bits and half of the channels.
        artefact: a file that `sparseattn train --method doublesparsity` has made of traces; "prompt" (default): the
            channels are those of the first rows that a sequence seals, its prompt's, and of `share` of their queries.
        share: share of the prompt's queries, evenly spaced, where there is no file. 0: the keys serve as queries, and a
            warning says so.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each" (its code's): every query
            head chooses for itself.

    An index row takes `channels * bits / 8` bytes and 4 for its levels: at D = 64, 12 bytes.

    Departures, from its code (andy-yang-1/DoubleSparse). There every query head has its own channels, and so a label
    cache of its own; here the query heads of a KV head share them, by the mean of their products. It has the channels
    of q or of k alone as well. It rounds the query as it does keys, too, and its levels are not rounded to 16 bits.
    Logits are divided by `sqrt(D)`, there by the root of the kept channels, which only the vote of a group can tell.
    The default, without a file, is ours.

    `scan_bytes`: the labels and levels of every row.
    """

    learns_once = True
    method = "doublesparsity"
    by_row = ("labels", "levels")

    def __init__(
        self, channels: int = 0, bits: int = 4, artefact: str = PROMPT, share: float = 0.1, group: str = "softmax"
    ) -> None:
        check_least(channels=(channels, 0))
        check_share(share)
        if bits not in (2, 4, 16):
            raise ValueError(f"bits is 2 or 4, or 16 for numbers as keys are, got {bits}")
        super().__init__(artefact, group)
        self.channels, self.bits, self.share = channels, bits, share
        self.queries_share = share if artefact == PROMPT else 0.0
        self.which = RowBuffer(2)  # [B,H,r] int64, the channels, the most important first
        self.labels = RowBuffer(2)  # [B,H,N,r] of the keys' dtype, or [B,H,N,r*bits/8] uint8
        self.levels = RowBuffer(2)  # [B,H,N,2] 16 bits, least number and step; none with bits=16

    def taken(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        importance = parameters["importance"]
        size = importance.shape[1]
        return {"which": importance.topk(self._kept(size)).indices}

    def append(self, rows: Rows) -> None:
        self.learn(rows)
        keys = rows.keys
        kept = keys.gather(3, self.which.data[:, :, None].expand(-1, -1, keys.shape[2], -1))  # [B,H,n,r]
        if self.bits == 16:
            self.labels.append(kept)
            return
        steps = (1 << self.bits) - 1
        least, most = kept.float().aminmax(dim=3)
        levels = torch.stack([least, (most - least) / steps], 3).to(half(keys))
        low, step = levels.float().split(1, 3)
        names = ((kept.float() - low) / torch.where(step > 0, step, 1)).round_().clamp_(0, steps)
        self.levels.append(levels)
        self.labels.append(packed(names.to(torch.uint8), self.bits))

    def logits(self, query: Tensor, valid: Tensor) -> Tensor:
        channels = self.which.visible  # [B,H,r]
        chosen_query = query.float().gather(3, channels[:, :, None].expand(-1, -1, query.shape[2], -1))  # [B,H,G,r]
        chosen_query /= self.temperature(query.shape[3])
        labels = self.labels.visible
        if self.bits < 16:
            names = unpacked(labels, channels.shape[2], self.bits)
            low, step = self.levels.visible.float().mT[:, :, :, None].unbind(2)  # [B,H,1,N] each
            logits = (chosen_query @ names.float().mT).mul_(step).addcmul_(chosen_query.sum(3, keepdim=True), low)
        else:
            logits = chosen_query @ labels.float().mT
        return logits.masked_fill_(~valid[:, None, None], -torch.inf)

    def reads(self, query: Tensor) -> tuple[int, int]:
        kept = self._kept(query.shape[3])
        return kept * self.bytes_of(query) if self.bits == 16 else -(-kept * self.bits // 8) + 4, 0

    def scoring(self, query: Tensor, sealed: int) -> Launch:
        return products(query, sealed, self._kept(query.shape[3]))

    def _kept(self, size: int) -> int:
        """Channels, of keys of `size`."""
        return min(self.channels or max(size // 4, 1), size)


def packed(names: Tensor, bits: int) -> Tensor:
    """Return names `[..,r]` uint8 below `2**bits` as bytes `[..,r*bits/8]`, the first in a byte's low bits and the last
    byte filled up with zeros."""
    each = 8 // bits
    parts = torch.nn.functional.pad(names, (0, -names.shape[-1] % each)).unflatten(-1, (-1, each))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=names.device)
    return (parts << shifts).sum(-1, dtype=torch.uint8)


def unpacked(labels: Tensor, count: int, bits: int) -> Tensor:
    """Return the first `count` names `[..,count]` uint8 of `packed` ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=labels.device)
    return (labels[..., None] >> shifts & (1 << bits) - 1).flatten(-2)[..., :count]
