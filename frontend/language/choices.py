"""How `select` compares its choices. The scoring itself is done by the runtime.

Each method is a constant to pass as `choices_method`; its name as a string works as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from rootlace.wire.protocol import ChoicesMethod as ChoicesMethodName


@dataclass(frozen=True)
class ChoicesMethod:
    """A way of scoring choices, known to the runtime by its name."""

    name: ChoicesMethodName

    def __repr__(self) -> str:
        return f"rootlace.{self.name}"


token_length_normalized = ChoicesMethod("token_length_normalized")
"""The mean log-probability of a choice's tokens (the default)."""

greedy_token_selection = ChoicesMethod("greedy_token_selection")
"""Token by token, only the choices whose next token is likeliest are kept. A choice that has ended
counts as if it went on with the mean of its own log-probabilities."""

unconditional_likelihood_normalized = ChoicesMethod("unconditional_likelihood_normalized")
"""The mean over a choice's tokens of log p(token | prompt) - log p(token | choice alone)."""


def method_name(method: ChoicesMethod | str | None) -> ChoicesMethodName:
    """The wire name of `method`; None is the default. Raises TypeError for anything else."""
    if method is None:
        return token_length_normalized.name
    name = method.name if isinstance(method, ChoicesMethod) else method
    for known in get_args(ChoicesMethodName):
        if name == known:
            return known
    raise TypeError(
        f"choices_method must be one of {', '.join(get_args(ChoicesMethodName))}, not {method!r}"
    )
