"""A model of transformers without what comes before its head."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


class Head:
    """Whatever a model does to hidden states to get logits, computed by its own code: what it takes
    for its layers hands them over. Takes the model's layers away from it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._given = _Given()
        setattr(model, model.base_model_prefix, self._given)
        self._model = model

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> [N, V]."""
        self._given.hidden = hidden.unsqueeze(0)
        logits: torch.Tensor = self._model(inputs_embeds=self._given.hidden, use_cache=False).logits
        return logits[0]


class _Output:
    """What layers may have found, whatever a model calls it: hidden states, and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(torch.nn.Module):
    hidden: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.hidden)
