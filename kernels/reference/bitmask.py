"""Token masks of constrained decoding: packed bits, one row per mask.

y[r, i] = x[r, i]  if bit (i mod 32) of word (i div 32) of r's mask is set,  -inf otherwise

In `apply_bitmask` r's mask is row r, in `apply_mask_rows` row rows[r] of a table.
"""

from __future__ import annotations

import numpy as np
import torch


def apply_bitmask(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Mask logits [R, V] in place by mask int32 [R, W]; ids beyond 32 * W are not allowed."""
    vocab = logits.shape[1]
    forbidden = _forbidden(mask[:, : (vocab + 31) // 32])[:, :vocab]
    logits[:, : forbidden.shape[1]].masked_fill_(forbidden, float("-inf"))
    logits[:, forbidden.shape[1] :] = float("-inf")


def apply_mask_rows(logits: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
    """Mask logits [R, V] in place by table int32 [N, W], rows int [R]; else as `apply_bitmask`."""
    apply_bitmask(logits, table.index_select(0, rows))


def _forbidden(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, W] -> bool [R, 32 * W], set where the bit is not."""
    if (
        words.device.type == "cpu"
    ):  # torch has no operation that unpacks bits; NumPy's is vectorised
        packed = np.ascontiguousarray((~words).numpy()).view(np.uint8)
        bits = np.unpackbits(packed, axis=1, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    return forbidden_by_shifts(words)


def forbidden_by_shifts(words: torch.Tensor) -> torch.Tensor:
    """As `_forbidden`, on any device."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).eq(0).view(len(words), -1)
