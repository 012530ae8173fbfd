"""Errors of the HTTP interface: one status per kind, in the shapes of the interfaces."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from rootlace.wire.errors import (
    InternalError,
    InvalidConstraint,
    InvalidRequest,
    Overloaded,
    RootlaceError,
    ServerUnavailable,
)

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""nginx's status in logs for a client that disconnected."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_AFTER_SECONDS = 1

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    422: "unprocessable_entity_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class InvalidParameter(InvalidRequest):
    """Wrong field of the body; `param` is its path, such as `messages[0].content`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class NotFound(InvalidRequest):
    """Path, file or record that does not exist, or no longer exists."""

    code = "not_found"
    http_status = 404


class Forbidden(InvalidRequest):
    """Caller that may not ask: a web page or a host name that the server was not told of."""

    code = "forbidden"
    http_status = 403


class UnsupportedMediaType(InvalidRequest):
    """Body of another type than the endpoint takes."""

    code = "unsupported_media_type"
    http_status = 415


def named(error: RootlaceError, prompt: str | None, choices: str = "choices") -> RootlaceError:
    """Give the error's field its name in the body of the request.

    `prompt` is the field of the prompt, and `choices` that of a `Select`'s choices.
    """
    if isinstance(error, InvalidRequest) and error.param is not None:
        if error.param == "prompt":
            error.param = prompt
        elif error.param == "prompt_logprobs_from":
            error.param = "logprob_start_len"  # only sglang's interface says where from
        else:
            error.param = error.param.replace("choices[", f"{choices}[")
    return error


def error_body(error: Exception, path: str = "") -> dict[str, object]:
    """Return the JSON for an exception of a handler, in the shape that clients of `path` expect."""
    status, message, code, param = 500, "internal error", InternalError.code, None
    if isinstance(error, RootlaceError):
        status, message, code = error.http_status, str(error), error.code
        param = getattr(error, "param", None)
    elif isinstance(error, web.HTTPException):
        status, message = error.status, error.text or error.reason
        code = error.reason.lower().replace(" ", "_")
        if isinstance(error, web.HTTPMethodNotAllowed):
            allowed = " or ".join(sorted(error.allowed_methods))
            message = f"{error.method} is not answered here; use {allowed}"
        elif isinstance(error, web.HTTPRequestEntityTooLarge) and message.startswith("Maximum"):
            message += " The server's --max-body says how large a body may be."
    if path.startswith("/api/"):  # Ollama
        # Only the message can name the field; a constraint's message names its kind.
        if code == InvalidConstraint.code and param:
            message = f"{param}: {message}"
        return {"error": message}
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    anthropic = path.startswith("/v1/messages")
    if anthropic and isinstance(error, web.HTTPRequestEntityTooLarge):
        kind = "request_too_large"
    about = {"message": message, "type": kind, "param": param, "code": code}
    return {"type": "error", "error": about} if anthropic else {"error": about}


def error_response(error: Exception, path: str = "") -> web.Response:
    """Return the reply to an exception of a handler, before its reply has begun."""
    headers: dict[str, str] = {}
    status = 500
    if isinstance(error, RootlaceError):
        status = error.http_status
        if not error.retry:
            # OpenAI's and Anthropic's clients send 408, 429 and 5xx again, twice, without it.
            headers["x-should-retry"] = "false"
    elif isinstance(error, web.HTTPException):
        status = error.status
        # The header of a 405 that lists the allowed methods.
        headers = {k: v for k, v in error.headers.items() if k == "Allow"}
    if isinstance(error, Overloaded | ServerUnavailable):
        retry_after = error.retry_after if isinstance(error, Overloaded) else None
        seconds = RETRY_AFTER_SECONDS if retry_after is None else retry_after
        headers["Retry-After"] = str(math.ceil(seconds))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=status,
        body=msgspec.json.encode(error_body(error, path)),
        content_type="application/json",
        headers=headers,
    )


def reply_to(request: web.Request, error: Exception) -> web.Response:
    """Return the reply to an exception; an unexpected one is logged with its traceback.

    Raises aiohttp's redirections again.
    """
    if isinstance(error, RootlaceError | web.HTTPException):
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise error
        return error_response(error, request.path)
    if isinstance(error, web.RequestPayloadError):
        # A wrong Content-Encoding, say: nothing else can be read from this connection.
        reason = " ".join(str(error).split())
        reply = error_response(InvalidRequest(f"the body cannot be read: {reason}"), request.path)
        reply.force_close()
        request.content.feed_eof()  # or the rest would be read, which is logged as a fault of ours
        return reply
    if isinstance(error, ConnectionResetError):
        # The client is gone, and nobody reads this; raised, it would be logged as a fault of ours.
        return web.Response(status=CLIENT_GONE)
    log.exception("%s %s failed", request.method, request.path)
    return error_response(error, request.path)
