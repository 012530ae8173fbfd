"""Endpoint of a running runtime, here or elsewhere."""

from __future__ import annotations

import array
import json
import operator
import re
import sys
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from rootlace.client.channel import Channel, Completion
from rootlace.client.connection import Connection
from rootlace.wire import protocol
from rootlace.wire.errors import (
    InvalidRequest,
    RootlaceError,
    ServerUnavailable,
    Unauthorized,
    from_code,
)
from rootlace.wire.protocol import VectorKind

# Answer -------------------------------------------------------------------------------------------
#
# Answer to an operation outside any program's branch.


class Answer(Completion):
    """Sink of one operation; keeps its terminal event."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        super().__init__()
        self.event: protocol.Event | None = None

    def __call__(self, event: protocol.Event) -> None:
        self.event = event
        self.finish()

    def get(self) -> protocol.Event:
        """Wait for the event and return it. Raises the typed error of a failed operation."""
        self.wait()
        return self._event()

    async def get_async(self) -> protocol.Event:
        """`get` for an event loop."""
        await self.wait_async()
        return self._event()

    def _event(self) -> protocol.Event:
        event = self.event
        assert event is not None
        if isinstance(event, protocol.Failed):
            raise from_code(event.code, event.message, event.param)
        return event


def send(connection: Channel, make: Callable[[int], protocol.Op]) -> Answer:
    """Send one operation that belongs to no branch."""
    answer = Answer()
    connection.send(make(connection.next_op()), answer)
    connection.count_round_trip()
    connection.flush()
    return answer


Make = Callable[[int, int], protocol.Op]
"""Makes an operation from its own number and its branch's."""


def compute(
    connection: Channel,
    parts: Sequence[protocol.Part],
    program: str = "",
    adapter: str | None = None,
    last: Make = protocol.Prefill,
) -> tuple[int, list[Answer]]:
    """Open a branch with `parts`, then the operation `last`. Returns the branch's number and the
    answers to wait for. Raises InvalidRequest, and leaves no branch, if they cannot be sent."""
    branch = connection.next_branch()
    makes: list[Make] = [
        partial(protocol.Open, program=program, adapter=adapter),
        partial(protocol.Append, parts=tuple(parts)),
        last,
    ]
    answers = []
    try:
        for make in makes:
            answers.append(Answer())
            connection.send(make(connection.next_op(), branch), answers[-1])
    except InvalidRequest:
        close(connection, branch)
        raise
    return branch, answers


def close(connection: Channel, branch: int, cancel: bool = False) -> None:
    """Close the branch once it is computed, or at once with `cancel`; its KV stays cached."""
    if cancel:
        connection.send(protocol.Cancel(connection.next_op(), branch), Answer())
    connection.send(protocol.Close(connection.next_op(), branch), Answer())
    connection.flush()


def cache(connection: Channel, texts: Sequence[protocol.Text], adapter: str | None = None) -> None:
    """Compute `texts` and keep only their KV in the cache. Waits; raises typed errors."""
    branch, answers = compute(connection, texts, adapter=adapter)
    close(connection, branch)
    for answer in answers:
        answer.get()


# Vectors ------------------------------------------------------------------------------------------
#
# Vectors of texts, outside any program.


Content = str | Sequence[int]
"""Text, or its token ids."""


def ask(
    connection: Channel,
    texts: Sequence[Content],
    pooling: VectorKind | None,
    normalise: bool,
    namespace: str,
    adapter: str,
) -> Answer:
    """Send an `Embed`. Scores of labels are never normalised. Raises InvalidRequest if the
    operation cannot be sent."""
    if isinstance(texts, str):
        raise InvalidRequest("texts is a single text, not a list of them")
    inputs = tuple(_input(one, index) for index, one in enumerate(texts))
    normalise = normalise and pooling != "labels"
    return send(
        connection, lambda op: protocol.Embed(op, inputs, pooling, normalise, namespace, adapter)
    )


def _input(content: Content, index: int) -> protocol.Text | protocol.Tokens:
    if isinstance(content, str):
        return protocol.Text(content)
    try:
        if not isinstance(content, bytes):
            return protocol.Tokens(tuple(map(operator.index, content)))
    except TypeError:
        pass
    raise InvalidRequest(f"texts[{index}] is neither a text nor a list of token ids: {content!r}")


def vectors_of(event: protocol.Event) -> list[list[float]]:
    """Return the vectors of an answer."""
    assert isinstance(event, protocol.Embedded)
    vectors = []
    for data in event.vectors:
        numbers = array.array("f", data)
        if sys.byteorder == "big":
            numbers.byteswap()
        vectors.append(numbers.tolist())
    return vectors


# Endpoint -----------------------------------------------------------------------------------------


_PUBLIC_KEY = re.compile("[0-9a-f]{64}")

LOAD_SECONDS = 600.0
"""Seconds that loading a model by its name may take."""


class RuntimeEndpoint:
    """Runtime at `url`: `tcp://host:port` or `ipc://path` of a program socket, or the `http://`
    address of a server, which tells its program socket. A server started with `--program-key`
    encrypts, and its public key stands behind `#` in the address.

    All programs and threads share one connection. When the connection is lost, running operations
    fail with ServerUnavailable, and the next program makes a new connection. Raises
    ServerUnavailable when nobody answers, Unauthorized for a wrong `api_key`. `model` names one of
    a server's several models; the server loads it where necessary. Programs of another model need
    another endpoint.
    """

    _finalizer: Any = None

    def __init__(
        self, url: str, api_key: str | None = None, *, model: str = "", **connection_options: Any
    ) -> None:
        self._address = url
        self._api_key = api_key or ""
        self._options = {"model": model, **connection_options}
        if model:
            self._options.setdefault("connect_timeout", LOAD_SECONDS)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.connect()

    def __reduce__(self) -> Any:
        """Pickle the address: another process has a connection of its own, and the runtime stays
        with its process. Raises TypeError for backends without such an address."""
        if type(self).connect is not RuntimeEndpoint.connect:
            raise TypeError(f"{type(self).__name__} cannot be pickled: make one in each process")
        endpoint = partial(RuntimeEndpoint, **self._options)
        return endpoint, (self._address, self._api_key)

    @property
    def url(self) -> str | None:
        """Address that the endpoint was made with."""
        return self._address

    @property
    def endpoint(self) -> Self:
        return self

    @property
    def model_info(self) -> protocol.ModelInfo:
        """Description of the runtime's model."""
        return self.connect().model

    def get_model_name(self) -> str:
        return self.model_info.name

    def connect(self) -> Channel:
        """Return the connection; a new one if the last was lost."""
        with self._lock:
            if self._connection is None or self._connection.lost is not None:
                address = program_address(self._address, self._api_key)
                connection = Connection(address, api_key=self._api_key, **self._options)
                if self._finalizer is not None:
                    self._finalizer()
                self._connection = connection
                self._finalizer = weakref.finalize(self, connection.close)
            return self._connection

    def close(self) -> None:
        """Cancel running operations and close the connection."""
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, op_type: Callable[..., protocol.Op]) -> protocol.Event:
        """Send one operation that belongs to no branch and wait for its answer."""
        return send(self.connect(), op_type).get()

    def embed(
        self,
        texts: Sequence[Content],
        *,
        pooling: VectorKind | None = None,
        normalise: bool = True,
        namespace: str = "",
        adapter: str = "",
    ) -> list[list[float]]:
        """Compute a vector for each text (or list of token ids).

        `pooling`: "last" is the final hidden state of the last token, "mean" the mean over all
        tokens. "labels" are the label scores of a text classifier, never normalised. None: the
        pooling that the model's folder names, else "last". Raises typed errors.
        """
        answer = ask(self.connect(), texts, pooling, normalise, namespace, adapter)
        return vectors_of(answer.get())

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
        answer = ask(self.connect(), texts, pooling, normalise, namespace, adapter)
        return vectors_of(await answer.get_async())

    def flush_cache(self, empty_cache: bool = True) -> None:
        """Evict every cached prefix that no running request uses."""
        self.ask(protocol.FlushCache)

    def unpin(self, pin: str) -> None:
        """Release a pin by the `cache_pin` of its meta information. Raises InvalidRequest if the
        pin's time is over."""
        self.ask(partial(protocol.Unpin, pin=pin))

    def get_server_info(self) -> dict[str, Any]:
        """Return the runtime's counters, and the model under `"model"`."""
        status = self.ask(protocol.GetStatus)
        assert isinstance(status, protocol.Status)
        return {**status.values, "model": msgspec.to_builtins(self.model_info)}

    def __repr__(self) -> str:
        return f"RuntimeEndpoint({self.url!r})"


def program_address(url: str, api_key: str) -> str:
    """Return the program socket's address: `url` itself, or as the HTTP server at `url` tells."""
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
    # A server that listens on every interface cannot know the name that reached it.
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
        raise kind(f"{request.full_url} answered {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerUnavailable(f"there is no server at {url}: {reason}") from None
    if not isinstance(info, dict):
        raise ServerUnavailable(f"{url} is not a Rootlace server")
    return info


# Default ------------------------------------------------------------------------------------------


# The only process-wide state in the package; `set_default_backend` exists to set it.
_default: list[Any] = []


def set_default_backend(backend: Any) -> None:
    """Run programs on `backend` (a Runtime, Engine or RuntimeEndpoint) unless they name another.

    None removes the default.
    """
    if backend is not None:
        endpoint_of(backend)
    _default[:] = [] if backend is None else [backend]


def endpoint_of(backend: Any = None) -> RuntimeEndpoint:
    """Return the endpoint behind `backend`, or behind the default backend.

    Raises InvalidRequest without any backend, TypeError for an object that is not a backend.
    """
    if backend is None:
        if not _default:
            raise InvalidRequest(
                "no backend: call rootlace.set_default_backend(rootlace.Runtime(model=...)), "
                "or give backend=..."
            )
        backend = _default[0]
    endpoint = getattr(backend, "endpoint", backend)
    if not isinstance(endpoint, RuntimeEndpoint):
        raise TypeError(
            f"a backend is a Runtime or a RuntimeEndpoint, not {type(backend).__name__}"
        )
    return endpoint


def flush_cache(backend: Any = None, empty_cache: bool = True) -> bool:
    """Evict every cached prefix that is not in use. Returns False without any backend."""
    if backend is None and not _default:
        return False
    endpoint_of(backend).flush_cache()
    return True


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """Return the runtime's counters and the model's description; None without any backend."""
    if backend is None and not _default:
        return None
    return endpoint_of(backend).get_server_info()
