"""Token masks of constrained decoding: packed bits, one row per sequence.

y[r, i] = x[r, i]  if bit (i mod 32) of word (i div 32) of mask[r] is set,  -inf otherwise
"""

from __future__ import annotations

import torch


def apply_bitmask(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Mask logits [R, V] in place by mask int32 [R, W]; ids beyond 32 * W are not allowed."""
    rows, vocab = logits.shape
    words = mask[:, : (vocab + 31) // 32]
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = ((words.unsqueeze(-1) >> shifts) & 1).bool().view(rows, -1)[:, :vocab]
    logits[:, : allowed.shape[1]].masked_fill_(~allowed, float("-inf"))
    logits[:, allowed.shape[1] :] = float("-inf")
