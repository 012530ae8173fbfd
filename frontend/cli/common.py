"""Helpers of commands: failing with one line, finding the model, asking a server."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from rootlace.wire.errors import ServerUnavailable

if TYPE_CHECKING:
    from rootlace.runtime.model.checkpoint.config import ModelConfig
    from rootlace.runtime.model.checkpoint.source import ModelSource

# Failure ------------------------------------------------------------------------------------------
#
# How a command fails: one clear line on standard error and exit code 1. `app` does so for every
# `RootlaceError`.


INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""

_RUNTIME_MODULES = (
    *("aiohttp", "huggingface_hub", "interegular", "jsonschema", "jsonschema_rs", "llguidance"),
    *("numpy", "outlines_core", "tokenizers", "torch", "yaml"),
)


def tell(message: str) -> None:
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(message, err=True)


def fail(message: str) -> NoReturn:
    tell(message)
    raise click.exceptions.Exit(1)


def check_runtime() -> None:
    """End the command with a hint if `rootlace[runtime]` is not installed. Imports nothing."""
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


_TIMEOUT = 60.0


def ask(url: str, path: str, api_key: str | None, body: dict[str, Any] | None = None) -> Any:
    """Return the server's answer; end the command if it is an error or missing. Raises
    ServerUnavailable if the server may answer later."""
    import urllib.error
    import urllib.request

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


def described_model(model: str) -> str:
    """Return the path of the model folder or GGUF file `model`. Raises RootlaceError if none."""
    from rootlace.runtime.model.checkpoint.config import check_config
    from rootlace.runtime.model.checkpoint.source import model_source
    from rootlace.runtime.model.hub.local import local_model

    source = model_source(local_model(model, weights=False))
    check_config(source, ignored=None)
    return str(source.path.absolute())


def draft_model(
    model: str, allow_pickle: bool = False, ignored: Collection[str] = (), *, weights: bool = True
) -> str:
    """Return the path of the draft model or head `model`. Raises RootlaceError if it is none, or
    with `weights` cannot be served. A head is checked with its model."""
    from rootlace.runtime.model.hub.local import local_model
    from rootlace.runtime.model.options import names_head

    path = local_model(model, weights=weights, allow_pickle=allow_pickle)
    if names_head(path):
        return str(Path(path).expanduser().absolute())
    if not weights:
        return described_model(model)
    return str(served_model(model, allow_pickle, ignored)[0].path.absolute())


def served_model(
    model: str | None, allow_pickle: bool = False, ignored: Collection[str] = ()
) -> tuple[ModelSource, ModelConfig | None]:
    """Return the source of a model (None: the demo model), and its config if read without torch.
    Raises RootlaceError if it is none or cannot be served."""
    from rootlace.runtime.assets import demo_model
    from rootlace.runtime.model.checkpoint.config import check_config
    from rootlace.runtime.model.checkpoint.source import servable_source
    from rootlace.runtime.model.hub.local import local_model

    try:
        named = str(demo_model()) if model is None else model
    except FileNotFoundError as error:
        fail(str(error))
    source = servable_source(local_model(named, allow_pickle=allow_pickle), allow_pickle)
    return source, check_config(source, ignored)


# Backend ------------------------------------------------------------------------------------------


@contextmanager
def connected(model: str | None, url: str | None, api_key: str | None) -> Iterator[Any]:
    """Connect to the backend at `url`, which may have several models, or start a runtime with
    `model` (default: the demo model). The block's end closes the backend. Raises RootlaceError if
    there is none."""
    import rootlace as rl

    if url is not None:
        with closing(rl.RuntimeEndpoint(url, api_key or None, model=model or "")) as backend:
            yield backend
        return
    source, _ = served_model(model)
    check_runtime()
    with rl.Runtime(model_path=source.path.absolute()) as runtime:
        yield runtime
