"""Whether, and how hard, a model that can is to think: what chat templates are told of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from rootlace.runtime.gateway.http.body import Body
from rootlace.runtime.gateway.http.fields import ignored


class Thinking(Body):
    """As Anthropic's clients say it."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: Annotated[int | None, ignored("thoughts have no limit of their own")] = None
    display: Annotated[str | None, ignored("thoughts are shown as they are")] = None


def thinking_arguments(
    thinking: bool | Thinking | None = None, effort: str | None = None
) -> dict[str, Any]:
    """Arguments of chat templates, by the names that the families' templates have for them."""
    arguments: dict[str, Any] = {}
    if thinking is not None:
        enabled = thinking.type != "disabled" if isinstance(thinking, Thinking) else thinking
        arguments = {"thinking": enabled, "enable_thinking": enabled}
    if effort is not None:
        arguments["reasoning_effort"] = effort
    return arguments
