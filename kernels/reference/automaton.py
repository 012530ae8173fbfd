"""Steps of finite automata whose tokens fall into classes (`interface.AutomatonTables`).

y[r] = next_state[next_start[x[r]] + token_class[class_row[x[r]], t]],  t = tokens[source[r]]

where source[r] is not negative, x[r] elsewhere; the mask that follows is mask_of[y[r]].
"""

from __future__ import annotations

import torch

from rootlace.kernels.interface import AutomatonTables

DEAD = 0


def step_automata(
    states: torch.Tensor,
    source: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    tables: AutomatonTables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """states, source, rows int32 [R], tokens int32 [P] -> (states, rows), int32 [R] each."""
    vocab = tables.token_class.shape[1]
    before = states.clamp(min=0).long()
    taken = tokens.index_select(0, source.clamp(min=0)).long()
    place = tables.class_row[before] * vocab + taken.clamp(0, vocab - 1)
    classes = tables.token_class.view(-1)[place]
    after = tables.next_state[tables.next_start[before] + classes]
    after = torch.where((taken >= 0) & (taken < vocab), after, DEAD)
    found = torch.where((source >= 0) & (states >= 0), after, states)
    masks = tables.mask_of[found.clamp(min=0).long()]
    return found, torch.where(found >= 0, masks, rows)
