"""Steps of finite automata whose tokens fall into classes.

y[r] = next_state[x[r], token_class[t[r]]]  if x[r] >= 0,  -1 otherwise
"""

from __future__ import annotations

import torch


def advance_states(
    states: torch.Tensor,
    tokens: torch.Tensor,
    token_class: torch.Tensor,
    next_state: torch.Tensor,
) -> torch.Tensor:
    """states int32 [R], tokens int [R], token_class int32 [V], next_state int32 [S, C]
    -> int32 [R]; -1 is the state of what is forbidden."""
    classes = token_class.index_select(0, tokens).long()
    index = states.clamp(min=0).long() * next_state.shape[1] + classes
    after = next_state.view(-1).index_select(0, index)
    return torch.where(states >= 0, after, -1)
