"""Token masks of constrained decoding: packed bits, one row of a table per mask.

y[r, i] = x[r, i]  if rows[r] = -1, or bit (i mod 32) of word (i div 32) of mask rows[r] is set
          -inf     otherwise; also for ids beyond the mask's last word
"""

from __future__ import annotations

import numpy as np
import torch


def allows(mask: np.ndarray, token: int) -> bool:
    """Whether a mask int32 [W] allows `token`, which is not negative."""
    word = token >> 5
    return word < len(mask) and bool(mask.item(word) >> (token & 31) & 1)


def allowed_ids(mask: np.ndarray, vocab: int) -> np.ndarray:
    """int64: the tokens that a mask int32 [W] allows, ascending."""
    octets = mask.view(np.uint8)
    count = min(vocab, 8 * len(octets))
    return np.flatnonzero(np.unpackbits(octets, count=count, bitorder="little").view(bool))


def apply_masks(logits: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
    """Mask logits [R, V] in place by table int32 [N, W] and rows int [R]."""
    if logits.device.type == "cpu":
        masked = (rows >= 0).nonzero().squeeze(1)
        if len(masked) == len(rows):
            _apply(logits, table[rows])
            return
        chosen = logits[masked]
        _apply(chosen, table[rows[masked]])
        logits[masked] = chosen
        return
    kept = logits.clone()
    _apply(logits, table[rows.clamp(min=0)])
    logits.copy_(torch.where(rows.unsqueeze(1) >= 0, logits, kept))


def _apply(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Mask each row of logits [R, V] by its row of masks [R, W]."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        _apply_on_host(logits.numpy(), masks.numpy())
        return
    words = masks[:, : (logits.shape[1] + 31) // 32]
    covered = logits[:, : 32 * words.shape[1]]
    covered.masked_fill_(_forbidden(words)[:, : covered.shape[1]], float("-inf"))
    logits[:, covered.shape[1] :] = float("-inf")


def _apply_on_host(logits: np.ndarray, masks: np.ndarray) -> None:
    """As `_apply`, several times as fast as torch on a CPU, which has no operation that unpacks
    bits, and whose `masked_fill_` is not vectorised."""
    vocab = logits.shape[1]
    words = masks[:, : (vocab + 31) // 32]
    count = min(vocab, 32 * words.shape[1])
    forbidden = np.unpackbits((~words).view(np.uint8), axis=1, count=count, bitorder="little")
    logits[:, count:] = -np.inf
    np.copyto(logits[:, :count], -np.inf, where=forbidden.view(bool))


def _forbidden(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, W] -> bool [R, 32 * W], set where the bit is not."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).eq(0).view(len(words), -1)
