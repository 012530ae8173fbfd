"""Whether, and how hard, a model that can is to think: what chat templates are told of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from rootlace.runtime.gateway.http.body import Body
from rootlace.runtime.gateway.http.fields import ignored

Budget = Annotated[int, msgspec.Meta(ge=0)]
"""So many tokens of thoughts at most: behind them they are ended."""


class Thinking(Body):
    """As Anthropic's clients say it."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: Budget | None = None
    display: Annotated[str | None, ignored("thoughts are shown as they are")] = None


def thinking_arguments(
    thinking: bool | Thinking | None = None, effort: str | None = None
) -> dict[str, Any]:
    """Arguments of chat templates, by the names that the families' templates have for them."""
    arguments: dict[str, Any] = {}
    if thinking is not None:
        enabled = thinking.type != "disabled" if isinstance(thinking, Thinking) else thinking
        arguments = {"thinking": enabled, "enable_thinking": enabled}
    if effort == "none":
        arguments = {"thinking": False, "enable_thinking": False}
    elif effort is not None:
        arguments["reasoning_effort"] = effort
    return arguments


def budget_of(given: int | None, thinking: bool | Thinking | None = None) -> int | None:
    """The bound of a body that says it by itself, or in Anthropic's way."""
    if given is None and isinstance(thinking, Thinking) and thinking.type != "disabled":
        return thinking.budget_tokens
    return given
