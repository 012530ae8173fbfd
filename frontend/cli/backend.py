"""The runtime that `run` and `chat` talk to: a running server's, or one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from rootlace.cli.common import check_runtime, fail
from rootlace.cli.model import served_model
from rootlace.wire.errors import RootlaceError

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
    folder = served_model(model)
    check_runtime()
    try:
        runtime: Any = rl.Runtime(model_path=folder)
    except RootlaceError as error:
        fail(str(error))
    try:
        yield runtime
    finally:
        runtime.shutdown()
