"""A runtime that is already running, here or elsewhere."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rootlace.client import vectors
from rootlace.client.answer import Answer
from rootlace.client.channel import Channel
from rootlace.client.connection import Connection
from rootlace.client.vectors import Content
from rootlace.wire import protocol
from rootlace.wire.errors import (
    InvalidRequest,
    RootlaceError,
    ServerUnavailable,
    Unauthorized,
)
from rootlace.wire.protocol import VectorKind

_PUBLIC_KEY = re.compile("[0-9a-f]{64}")

LOAD_SECONDS = 600.0
"""How long a model that is asked for by its name may take to be loaded."""


class RuntimeEndpoint:
    """Connects to `url`: `tcp://host:port` or `ipc://path` of a program socket, or the `http://`
    address of a server, which is asked for its program socket. A server started with
    `--program-key` encrypts, and its public key stands behind `#` in the address.

    One connection, shared by all programs and threads. When it is lost, what was running on it
    fails with ServerUnavailable, and the next program makes a new one. Raises ServerUnavailable
    when nobody answers, Unauthorized for a wrong `api_key`. `model` is the name of one of the
    models of a server that has several; it is loaded if it was not. Programs of another one need
    another endpoint.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        model: str = "",
        **connection_options: Any,
    ) -> None:
        self.url = url
        self._api_key = api_key or ""
        self._options = {"model": model, **connection_options}
        if model:
            self._options.setdefault("connect_timeout", LOAD_SECONDS)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._finalizer: Any = None
        self.connect()

    @property
    def model_info(self) -> protocol.ModelInfo:
        """What the runtime serves."""
        return self.connect().model

    def get_model_name(self) -> str:
        return self.model_info.name

    def connect(self) -> Channel:
        """The connection; a new one if the last was lost."""
        with self._lock:
            if self._connection is None or self._connection.lost is not None:
                address = program_address(self.url, self._api_key)
                connection = Connection(address, api_key=self._api_key, **self._options)
                if self._finalizer is not None:
                    self._finalizer()
                self._connection = connection
                self._finalizer = weakref.finalize(self, connection.close)
            return self._connection

    def close(self) -> None:
        """Cancel what runs and close the connection."""
        if self._finalizer is not None:
            self._finalizer()

    def ask(self, op_type: Callable[..., protocol.Op]) -> protocol.Event:
        """Send one operation that belongs to no branch and wait for its answer."""
        connection = self.connect()
        answer = Answer()
        connection.send(op_type(op=connection.next_op()), answer)
        connection.count_round_trip()
        connection.flush()
        return answer.get()

    def embed(
        self,
        texts: Sequence[Content],
        *,
        pooling: VectorKind | None = None,
        normalise: bool = True,
        namespace: str = "",
        adapter: str = "",
    ) -> list[list[float]]:
        """A vector for each text (or list of token ids).

        `pooling`: the final hidden state of the "last" token, the "mean" of those of all tokens, or
        "labels", the scores that a model which classifies texts gives its labels, which are as they
        are whatever `normalise` says; None: what the model's folder says it was trained for, the
        last token's if it does not say. Raises typed errors.
        """
        answer = vectors.ask(
            self.connect(),
            texts,
            pooling,
            normalise=normalise,
            namespace=namespace,
            adapter=adapter,
        )
        return vectors.vectors_of(answer.get())

    async def async_embed(
        self,
        texts: Sequence[Content],
        *,
        pooling: VectorKind | None = None,
        normalise: bool = True,
        namespace: str = "",
        adapter: str = "",
    ) -> list[list[float]]:
        """`embed` for an event loop."""
        answer = vectors.ask(
            self.connect(),
            texts,
            pooling,
            normalise=normalise,
            namespace=namespace,
            adapter=adapter,
        )
        return vectors.vectors_of(await answer.get_async())

    def flush_cache(self, empty_cache: bool = True) -> None:
        """Forget every cached prefix that no running request uses."""
        self.ask(protocol.FlushCache)

    def unpin(self, pin: str) -> None:
        """Let a pinned prompt go, by the `cache_pin` of its meta information. Raises InvalidRequest
        if its time was over before."""
        self.ask(partial(protocol.Unpin, pin=pin))

    def get_server_info(self) -> dict[str, Any]:
        """The runtime's counters, and the model under `"model"`."""
        status = self.ask(protocol.GetStatus)
        assert isinstance(status, protocol.Status)
        return {**status.values, "model": msgspec.to_builtins(self.model_info)}

    def __repr__(self) -> str:
        return f"RuntimeEndpoint({self.url!r})"


def program_address(url: str, api_key: str) -> str:
    """Where programs connect: `url` itself, or what the HTTP server at `url` says."""
    parts = urlsplit(url)
    if parts.scheme in ("tcp", "ipc", "inproc"):
        if parts.fragment and not _PUBLIC_KEY.fullmatch(parts.fragment):
            raise InvalidRequest(f"what stands behind # in {url!r} is not a server's public key")
        return url
    if parts.scheme not in ("http", "https"):
        raise InvalidRequest(f"{url!r} is neither http://, https://, tcp:// nor ipc://")
    address = _model_info(url, api_key).get("program_address")
    if not address:
        raise ServerUnavailable(f"the server at {url} has no socket for programs")
    target = urlsplit(str(address))
    # A server that listens on every interface cannot know the name by which we reached it.
    if target.scheme == "tcp" and target.hostname in ("0.0.0.0", "*", "::"):
        key = f"#{target.fragment}" if target.fragment else ""
        return f"tcp://{parts.hostname}:{target.port}{key}"
    return str(address)


def _model_info(url: str, api_key: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{url.rstrip('/')}/get_model_info")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            info = json.load(response)
    except urllib.error.HTTPError as error:
        kind: type[RootlaceError] = Unauthorized if error.code == 401 else ServerUnavailable
        raise kind(f"{url} answered {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerUnavailable(f"there is no server at {url}: {reason}") from None
    if not isinstance(info, dict):
        raise ServerUnavailable(f"{url} is not a Rootlace server")
    return info
