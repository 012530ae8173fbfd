"""Programs on what LiteLLM reaches: a hundred providers behind one function."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rootlace.client.openai_backend import openai_body, take_openai
from rootlace.client.service_backend import (
    Abilities,
    ChatRequest,
    Reply,
    Sample,
    ServiceBackend,
    Tell,
    openai_messages,
)
from rootlace.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RootlaceError,
    ServerUnavailable,
    Unauthorized,
)

_OPTIONS = {
    name: name
    for name in (
        "temperature", "top_p", "stop", "seed", "frequency_penalty", "presence_penalty",
        "logit_bias",
    )
}  # fmt: skip
# Its exceptions by their names; the first that fits. Importing it takes seconds.
_ERRORS: tuple[tuple[str, type[RootlaceError]], ...] = (
    ("Timeout", DeadlineExceeded),
    ("AuthenticationError", Unauthorized),
    ("PermissionDeniedError", Unauthorized),
    ("RateLimitError", Overloaded),
    ("BadRequestError", InvalidRequest),
    ("NotFoundError", InvalidRequest),
    ("UnprocessableEntityError", InvalidRequest),
)


class LiteLLMBackend(ServiceBackend):
    """Runs programs by `litellm.completion` (`pip install rootlace[litellm]`):
    `LiteLLMBackend("gemini/name")`. `options` are passed on with each request (`api_base`,
    `api_key`, ...).

    All text stands in messages. `json_schema` and `type=` are asked for as `response_format`. What
    cannot be asked for fails at its line, with the reason: what `OpenAIBackend` says, a `gen`
    behind other text in an assistant's message, and sampling options that OpenAI's own interface
    does not have.
    """

    def __init__(
        self,
        model: str,
        *,
        emulate: Collection[str] = (),
        concurrency: int = 16,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        super().__init__(
            _LiteLLM(model, options),
            "litellm",
            model,
            emulate=emulate,
            concurrency=concurrency,
            timeout=timeout,
        )


class _LiteLLM:
    """The service."""

    abilities = Abilities(_OPTIONS, advice="LiteLLM has no way to go on with one")

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        try:
            import litellm
        except ImportError:
            raise InvalidRequest(
                "LiteLLMBackend needs the package litellm: pip install rootlace[litellm]"
            ) from None
        self._complete = litellm.completion
        self._given = {"model": model, **options}

    def generate(self, request: ChatRequest, tell: Tell) -> Reply:
        asked = {
            **self._given,
            **openai_body(request, self.abilities),
            "messages": openai_messages(request.messages),
            "timeout": request.timeout,
        }
        reply = Reply([Sample() for _ in range(request.params.n)])
        try:
            said = self._complete(**asked)
            for event in said if request.stream else (said,):
                take_openai(event.model_dump(), reply, tell)
        except Exception as error:
            raise _typed(error) from error
        return reply


def _typed(error: Exception) -> RootlaceError:
    names = {kind.__name__ for kind in type(error).__mro__}
    kind = next((kind for name, kind in _ERRORS if name in names), ServerUnavailable)
    return kind(f"litellm: {type(error).__name__}: {error}")
