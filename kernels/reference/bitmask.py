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
    words = mask[:, : (vocab + 31) // 32]
    covered = logits[:, : 32 * words.shape[1]]
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # Several times as fast: torch has no operation that unpacks bits, and its masked_fill_ is
        # not vectorised.
        packed = np.ascontiguousarray((~words).numpy()).view(np.uint8)
        forbidden = np.unpackbits(packed, axis=1, count=covered.shape[1], bitorder="little")
        np.copyto(covered.numpy(), -np.inf, where=forbidden.view(bool))
    else:
        covered.masked_fill_(_forbidden(words)[:, : covered.shape[1]], float("-inf"))
    logits[:, covered.shape[1] :] = float("-inf")


def apply_mask_rows(logits: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
    """Mask logits [R, V] in place by table int32 [N, W], rows int [R]; else as `apply_bitmask`."""
    apply_bitmask(logits, table.index_select(0, rows))


def _forbidden(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, W] -> bool [R, 32 * W], set where the bit is not."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).eq(0).view(len(words), -1)
