"""Token masks of constrained decoding: packed bits, one row per mask.

y[r, i] = x[r, i]  if bit (i mod 32) of word (i div 32) of r's mask is set,  -inf otherwise

In `apply_bitmask` r's mask is row r, in `apply_mask_rows` row rows[r] of a table.
"""

from __future__ import annotations

import numpy as np
import torch


def apply_bitmask(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Mask logits [R, V] in place by mask int32 [R, W]; ids beyond 32 * W are not allowed."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        _mask_on_host(logits.numpy(), mask.numpy())
        return
    vocab = logits.shape[1]
    words = mask[:, : (vocab + 31) // 32]
    covered = logits[:, : 32 * words.shape[1]]
    covered.masked_fill_(_forbidden(words)[:, : covered.shape[1]], float("-inf"))
    logits[:, covered.shape[1] :] = float("-inf")


def apply_mask_rows(logits: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
    """Mask logits [R, V] in place by table int32 [N, W], rows int [R]; else as `apply_bitmask`."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        _mask_on_host(logits.numpy(), table.numpy()[rows.numpy()])
        return
    apply_bitmask(logits, table.index_select(0, rows))


def apply_chosen_masks(logits: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
    """As `apply_mask_rows`, where a row of -1 leaves its logits as they are."""
    if logits.device.type == "cpu":
        masked = (rows >= 0).nonzero().squeeze(1)
        chosen = logits[masked]
        apply_mask_rows(chosen, table, rows[masked])
        logits[masked] = chosen
        return
    kept = logits.clone()
    apply_mask_rows(logits, table, rows.clamp(min=0))
    logits.copy_(torch.where(rows.unsqueeze(1) >= 0, logits, kept))


def _mask_on_host(logits: np.ndarray, words: np.ndarray) -> None:
    """As `apply_bitmask`, several times as fast as torch on a CPU, which has no operation that
    unpacks bits, and whose `masked_fill_` is not vectorised."""
    vocab = logits.shape[1]
    used = (vocab + 31) // 32
    if words.shape[1] > used:
        words = words[:, :used]
    count = min(vocab, 32 * words.shape[1])
    forbidden = np.unpackbits((~words).view(np.uint8), axis=1, count=count, bitorder="little")
    if count < vocab:
        logits[:, count:] = -np.inf
        logits = logits[:, :count]
    np.copyto(logits, -np.inf, where=forbidden.view(bool))


def _forbidden(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, W] -> bool [R, 32 * W], set where the bit is not."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).eq(0).view(len(words), -1)
