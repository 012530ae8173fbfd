"""The typed errors: every error that crosses a border of Rootlace is one of these.

The `code` of an error is what travels on the wire (`protocol.Failed.code`) and what HTTP maps to a
status; `from_code` turns a received code back into the same Python type on the client's side.
"""

from __future__ import annotations


class RootlaceError(Exception):
    """Base of all errors raised by Rootlace."""

    code = "internal"
    http_status = 500
    retry = True
    """False: sent again as it is, the request ends in the same way, at the same cost. Clients that
    go by the status alone send it again."""


class InvalidRequest(RootlaceError):
    """The request itself is wrong: a bad parameter, an unknown branch, malformed content."""

    code = "invalid_request"
    http_status = 400
    param: str | None = None
    """The field that is wrong, where that is known: as `protocol` names it, or as the body of an
    HTTP request does. "prompt" is all text before the operation."""

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        if param is not None:
            self.param = param


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not serve."""

    code = "model_not_found"
    http_status = 404
    param = "model"


class InvalidConstraint(InvalidRequest):
    """A regex, JSON schema, grammar or list of choices that cannot be enforced."""

    code = "invalid_constraint"


class ConstraintNotMet(RootlaceError):
    """No text that satisfies the constraint was found within the allowed attempts."""

    code = "constraint_not_met"
    http_status = 422


class UnreadableValue(RootlaceError):
    """A generated text, such as one cut short, that is not a value of the requested type."""

    code = "unreadable_value"
    http_status = 422


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for even one token in the context window or the KV cache."""

    code = "context_length_exceeded"
    param = "prompt"


class UnsupportedModel(RootlaceError):
    """A model folder that is missing or damaged, or a model that is not implemented.

    The message names the file and the field or weight.
    """

    code = "unsupported_model"
    http_status = 400


class Unauthorized(RootlaceError):
    """The API key is missing or wrong."""

    code = "unauthorized"
    http_status = 401


class ProtocolError(RootlaceError):
    """A message that cannot be decoded, or a peer that speaks another protocol version."""

    code = "protocol"
    http_status = 400


class Overloaded(RootlaceError):
    """An admission bound is reached; the same request may succeed later: in `retry_after`
    seconds, where that is known."""

    code = "overloaded"
    http_status = 429
    retry_after: float | None = None


class QuotaExceeded(Overloaded):
    """An API key has used up its quota of requests or tokens."""

    code = "quota_exceeded"
    retry_after = 60.0


class PinRefused(Overloaded):
    """A prompt cannot be pinned: pins have the part of the cache that they may have."""

    code = "pin_refused"


class ClientSuspended(Overloaded):
    """Requests of this client ended the engine again and again: for a while it gets nothing."""

    code = "client_suspended"
    retry_after = 60.0
    retry = False


class DeadlineImpossible(Overloaded):
    """The queue already takes longer than the timeout of the request."""

    code = "deadline_impossible"


class DeadlineExceeded(RootlaceError):
    """The request was not done within the time that its client gave it."""

    code = "deadline_exceeded"
    http_status = 408
    retry = False

    @classmethod
    def after(cls, seconds: float) -> DeadlineExceeded:
        shown = float(f"{seconds:.4g}")  # what a run has left is 7.99982
        return cls(f"the request was not done within its timeout of {shown:g} s")


class BudgetExceeded(RootlaceError):
    """A run of a program has used up the tokens that its caller gave it."""

    code = "budget_exceeded"
    http_status = 429


class Cancelled(RootlaceError):
    """The operation was cancelled by its client, or by an earlier operation that failed."""

    code = "cancelled"
    http_status = 499


class ServerUnavailable(RootlaceError):
    """The runtime is starting, stopping, gone, or does not answer."""

    code = "unavailable"
    http_status = 503


class StateLost(ServerUnavailable):
    """The server was restarted, and has nothing of what a program had on it."""

    code = "state_lost"


class InternalError(RootlaceError):
    """A fault of the runtime; other requests are not affected."""

    code = "internal"
    http_status = 500

    @classmethod
    def of(cls, error: Exception) -> InternalError:
        """The error for clients after an unexpected `error`. The message of `error` is for the log
        alone: it may name paths of the server."""
        return cls(f"internal error ({type(error).__name__})")


class EndsEngine(InternalError):
    """Engines died of this request."""

    code = "ends_engine"
    retry = False


_BY_CODE: dict[str, type[RootlaceError]] = {
    kind.code: kind
    for kind in [*vars().values()]
    if isinstance(kind, type) and issubclass(kind, RootlaceError)
}


def from_code(code: str, message: str, param: str | None = None) -> RootlaceError:
    """The error that `code` stands for; an unknown code gives `InternalError`."""
    error = _BY_CODE.get(code, InternalError)(message)
    if param is not None and isinstance(error, InvalidRequest):
        error.param = param
    return error
