"""Shared by commands: failing with one line, finding the model, asking a running server."""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rootlace.wire.errors import RootlaceError, ServerUnavailable

if TYPE_CHECKING:
    from rootlace.runtime.model.checkpoint.config import ModelConfig

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
    """As `ask`, but raises ServerUnavailable where the server may answer later."""
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


# Model --------------------------------------------------------------------------------------------


def described_model(given: str) -> str:
    """The model `given`, a folder or a GGUF file; ends the command if it is none."""
    from rootlace.runtime.model.checkpoint.config import check_config
    from rootlace.runtime.model.checkpoint.source import model_source
    from rootlace.runtime.model.hub.local import local_model

    try:
        source = model_source(local_model(given, weights=False))
        check_config(source, ignored=None)
    except RootlaceError as error:
        fail(str(error))
    return str(source.path.absolute())


def served_model(
    given: str | None, allow_pickle: bool = False, ignored: Collection[str] = ()
) -> tuple[str, ModelConfig | None]:
    """As `described_model`, None: the embedded demo model; ends the command too if it cannot be
    served. With what its files say, where that takes no import of torch."""
    from rootlace.runtime.assets import demo_model
    from rootlace.runtime.model.checkpoint.config import check_config
    from rootlace.runtime.model.checkpoint.source import servable_source
    from rootlace.runtime.model.hub.local import local_model

    try:
        if given is None:
            given = str(demo_model())
        source = servable_source(local_model(given, allow_pickle=allow_pickle), allow_pickle)
        config = check_config(source, ignored)
    except (RootlaceError, FileNotFoundError) as error:
        fail(str(error))
    return str(source.path.absolute()), config


# Backend ------------------------------------------------------------------------------------------


ModelOption = Annotated[
    str | None,
    typer.Option(help="Model folder to start a runtime with.", show_default="demo model"),
]
UrlOption = Annotated[
    str | None, typer.Option(help="Use a running server: http://, tcp:// or ipc://.")
]
KeyOption = Annotated[str, typer.Option(help="The running server's key.")]


@contextmanager
def connected(model: str | None, url: str | None, api_key: str) -> Iterator[Any]:
    """The backend at `url`, or a runtime started with `model` (default: the demo model).

    It is closed at the end of the block. Ends the command where there is none.
    """
    import rootlace as rl

    if model is not None and url is not None:
        fail("give --model or --url, not both")
    if url is not None:
        try:
            backend: Any = rl.RuntimeEndpoint(url, api_key=api_key or None)
        except RootlaceError as error:
            fail(str(error))
        try:
            yield backend
        finally:
            backend.close()
        return
    folder, _ = served_model(model)
    check_runtime()
    try:
        runtime: Any = rl.Runtime(model_path=folder)
    except RootlaceError as error:
        fail(str(error))
    try:
        yield runtime
    finally:
        runtime.shutdown()
