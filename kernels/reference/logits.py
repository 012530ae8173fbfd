"""What happens to logits before sampling. In this order, on the float32 logits x of a row:

1. bias: x[t] += bias[t]; a bias of -inf bans t, whatever x[t] is
2. mask: x[t] = -inf where the mask does not allow t
3. repetition penalty r (Keskar et al. 2019, arXiv:1909.05858), for every token that was seen, in
   the prompt or the output: x[t] = x[t] / r if x[t] > 0 else x[t] * r
4. frequency penalty f and presence penalty p (OpenAI), for tokens of the output:
   x[t] -= f * count(t) + p, the amount computed in float64 and rounded to float32
"""

from __future__ import annotations

import torch

from rootlace.kernels.interface import LogitEdits
from rootlace.kernels.reference.bitmask import apply_masks


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """logits float32 or bfloat16 [R, V], not changed -> float32 [R, V]."""
    x = logits.to(torch.float32, copy=True)
    flat = x.view(-1)
    if edits.bias_start is not None:
        assert edits.bias_token is not None and edits.bias is not None
        _, index = _places(edits.bias_start, edits.bias_token, x.shape[1])
        banned = edits.bias == float("-inf")
        flat[index] = torch.where(banned, edits.bias, flat[index] + edits.bias)
    if edits.mask_row is not None:
        assert edits.mask_table is not None
        apply_masks(x, edits.mask_table, edits.mask_row)
    if edits.seen_start is not None:
        assert edits.seen_token is not None and edits.seen_count is not None
        assert edits.repetition_penalty is not None
        assert edits.frequency_penalty is not None and edits.presence_penalty is not None
        owner, index = _places(edits.seen_start, edits.seen_token, x.shape[1])
        old, by = flat[index], edits.repetition_penalty[owner]
        old = torch.where(old > 0, old / by, old * by)
        amount = edits.frequency_penalty[owner] * edits.seen_count + edits.presence_penalty[owner]
        amount = torch.where(edits.seen_count > 0, amount, 0.0)
        flat[index] = old - amount.float()
    return x


def _places(
    start: torch.Tensor, token: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, flat index), int64 each, of the entries of compressed rows."""
    rows = torch.arange(len(start) - 1, device=start.device)
    owner = rows.repeat_interleave(start.diff(), output_size=len(token))
    return owner, owner * vocab + token
