"""Typed errors: every error that crosses a border of Rootlace is one of these.

An error's `code` travels on the wire (`protocol.Failed.code`), and HTTP maps it to a status.
`from_code` turns a received code back into the same Python type on the client's side.
"""

from __future__ import annotations


class RootlaceError(Exception):
    """Base of all errors raised by Rootlace."""

    code = "internal"
    http_status = 500
    retry = True
    """False: the same request would fail again at the same cost. Clients that go by the status
    alone retry it all the same."""


class InvalidRequest(RootlaceError):
    """Fault of the request itself: a bad parameter, an unknown branch, malformed content."""

    code = "invalid_request"
    http_status = 400
    param: str | None = None
    """Wrong field, where known, as `protocol` or the body of an HTTP request names it. "prompt" is
    all text before the operation."""

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        if param is not None:
            self.param = param


class ModelNotFound(InvalidRequest):
    """Request for a model that this server does not serve."""

    code = "model_not_found"
    http_status = 404
    param = "model"


class InvalidConstraint(InvalidRequest):
    """Regex, JSON schema, grammar or list of choices that cannot be enforced."""

    code = "invalid_constraint"


class ConstraintNotMet(RootlaceError):
    """Failure to find a text that satisfies the constraint within the allowed attempts."""

    code = "constraint_not_met"
    http_status = 422


class UnreadableValue(RootlaceError):
    """Generated text, such as one cut short, that is not a value of the requested type."""

    code = "unreadable_value"
    http_status = 422


class ContextLengthExceeded(InvalidRequest):
    """Prompt that leaves no room for even one token in the context window or the KV cache."""

    code = "context_length_exceeded"
    param = "prompt"


class UnsupportedModel(RootlaceError):
    """Model folder that is missing or damaged, or a model that is not implemented.

    The message names the file and the field or weight.
    """

    code = "unsupported_model"
    http_status = 400


class Unauthorized(RootlaceError):
    """Missing or wrong API key."""

    code = "unauthorized"
    http_status = 401


class ProtocolError(RootlaceError):
    """Message that cannot be decoded, or a peer that speaks another protocol version."""

    code = "protocol"
    http_status = 400


class Overloaded(RootlaceError):
    """Full queue or other bound: the same request may succeed later, in `retry_after` seconds,
    where known."""

    code = "overloaded"
    http_status = 429
    retry_after: float | None = None


class QuotaExceeded(Overloaded):
    """Used-up quota of requests or tokens of an API key."""

    code = "quota_exceeded"
    retry_after = 60.0


class PinRefused(Overloaded):
    """Refused pin: pins already fill their part of the cache."""

    code = "pin_refused"


class ClientSuspended(Overloaded):
    """Client whose requests ended the engine again and again: for a while all are refused."""

    code = "client_suspended"
    retry_after = 60.0
    retry = False


class DeadlineImpossible(Overloaded):
    """Timeout of a request that is shorter than the queue already takes."""

    code = "deadline_impossible"


class DeadlineExceeded(RootlaceError):
    """Request that was not done within the client's timeout."""

    code = "deadline_exceeded"
    http_status = 408
    retry = False

    @classmethod
    def after(cls, seconds: float) -> DeadlineExceeded:
        shown = float(f"{seconds:.4g}")  # a run's remaining time is 7.99982 or the like
        return cls(f"the request was not done within its timeout of {shown:g} s")


class BudgetExceeded(RootlaceError):
    """Used-up token budget of a program's run."""

    code = "budget_exceeded"
    http_status = 429


class Cancelled(RootlaceError):
    """Operation cancelled by its client, or by an earlier operation that failed."""

    code = "cancelled"
    http_status = 499


class ServerUnavailable(RootlaceError):
    """Runtime that is starting, stopping, gone, or does not answer."""

    code = "unavailable"
    http_status = 503


class StateLost(ServerUnavailable):
    """Restart of the server that lost a program's state."""

    code = "state_lost"


class InternalError(RootlaceError):
    """Fault of the runtime; other requests are not affected."""

    code = "internal"
    http_status = 500

    @classmethod
    def of(cls, error: Exception) -> InternalError:
        """Make the error for clients after an unexpected `error`. The message of `error` goes to
        the log alone: it may name paths of the server."""
        return cls(f"internal error ({type(error).__name__})")


class EndsEngine(InternalError):
    """Request of which engines died."""

    code = "ends_engine"
    retry = False


_BY_CODE: dict[str, type[RootlaceError]] = {
    kind.code: kind
    for kind in [*vars().values()]
    if isinstance(kind, type) and issubclass(kind, RootlaceError)
}


def from_code(code: str, message: str, param: str | None = None) -> RootlaceError:
    """Return the error of type `code`; an unknown code gives `InternalError`."""
    error = _BY_CODE.get(code, InternalError)(message)
    if param is not None and isinstance(error, InvalidRequest):
        error.param = param
    return error
