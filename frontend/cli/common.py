"""What commands have in common: how they fail, and how they ask a running server."""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from typing import Annotated, Any, NoReturn

import typer

from rootlace.wire.errors import ServerUnavailable

# Failure ------------------------------------------------------------------------------------------
#
# How a command fails: one clear line on standard error and exit code 1.


INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""

_RUNTIME_MODULES = (
    *(
        "aiohttp",
        "huggingface_hub",
        "interegular",
        "jsonschema",
        "jsonschema_rs",
        "llguidance",
        "numpy",
    ),
    *("outlines_core", "tokenizers", "torch", "yaml"),
)


def fail(message: str) -> NoReturn:
    typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
    typer.echo(message, err=True)
    raise typer.Exit(1)


def check_runtime() -> None:
    """End the command with a hint where `rootlace[runtime]` is not installed. Imports nothing."""
    missing = [name for name in _RUNTIME_MODULES if not _is_there(name)]
    if missing:
        fail(
            "this needs the runtime, which is not installed here; install it with: "
            f"pip install 'rootlace[runtime]' (missing: {', '.join(missing)})"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


# Server -------------------------------------------------------------------------------------------


Url = Annotated[str, typer.Option(help="The running server.")]
ApiKey = Annotated[str, typer.Option(help="The server's key.", envvar="ROOTLACE_API_KEY")]

URL = "http://127.0.0.1:30000"
_TIMEOUT = 60.0


def ask(url: str, path: str, api_key: str, body: dict[str, Any] | None = None) -> Any:
    """The server's answer; ends the command where there is none, or an error."""
    try:
        return answer_of(url, path, api_key, body)
    except ServerUnavailable as error:
        fail(str(error))


def answer_of(url: str, path: str, api_key: str, body: dict[str, Any] | None = None) -> Any:
    """The same, but raises ServerUnavailable where the server says that it may answer later."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data=data)
    request.add_header("Content-Type", "application/json")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            answer = response.read()
            return json.loads(answer) if answer.startswith((b"{", b"[")) else answer
    except urllib.error.HTTPError as error:
        reason = f"{url}: {_message(error.read()) or error}"
        if error.code == ServerUnavailable.http_status:
            raise ServerUnavailable(reason) from None
        fail(reason)
    except (OSError, ValueError) as error:
        fail(f"there is no server at {url}: {getattr(error, 'reason', error)}")


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
