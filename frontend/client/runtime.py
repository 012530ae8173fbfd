"""A runtime that a program starts for itself: the gateway, and with it the engine, as a child."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rootlace.client import cached_text
from rootlace.client.endpoint import RuntimeEndpoint
from rootlace.client.gateway_process import GatewayProcess
from rootlace.client.vectors import Content
from rootlace.client.warm_up import first_uses, generate_once
from rootlace.language.expressions import Expression
from rootlace.language.signature import keyword, with_keywords
from rootlace.runtime.config import RuntimeConfig
from rootlace.runtime.options import settings
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Text, VectorKind

if TYPE_CHECKING:
    from concurrent.futures import Future

R = TypeVar("R", bound="Runtime")


def runtime_config(
    model: str, program_address: str, options: Mapping[str, Any], name: str = ""
) -> dict[str, Any]:
    """A `RuntimeConfig` as the gateway reads it from its standard input: nested dictionaries.

    `options` are by keyword or sglang's name. Clients know the model as `name` unless an option
    says otherwise. Raises TypeError for an option that does not exist.
    """
    config: dict[str, Any] = {
        "gateway": {"model": model, "program_address": program_address},
        "engine": {"executor": {"model": model}},
    }
    known = {name: setting for setting in settings(RuntimeConfig) for name in setting.names}
    for given, value in options.items():
        setting = known.get(given)
        if setting is None:
            close = get_close_matches(given, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"Runtime() got an unexpected keyword argument {given!r}{hint}")
        if value is None and setting.required:
            continue  # the default that the signature shows
        if isinstance(value, Path):
            value = str(value)
        if isinstance(value, Mapping):
            value = [f"{key}={one}" for key, one in value.items()]
        setting.put(config, not value if given == setting.option.opposite else value)
    if name and not config["gateway"].get("served_name"):
        config["gateway"]["served_name"] = name
    return config


class Runtime:
    """Starts a runtime for `model` (also `model_path`) and connects to it: a folder or GGUF file,
    a name that `rootlace models` lists (`smollm2`), or a name on the Hugging Face hub
    (`Qwen/Qwen3-0.6B`), which is downloaded where it is not in the cache yet.

    Without a model it is the embedded demo model.

    `adapters` are PEFT's folders, by name: {"formal": "path/to/folder"}.

    The options are fields of `rootlace.runtime.config`, which explains them as `rootlace serve
    --help` does; sglang's names for them are taken too. With `state`, a folder, a gateway that dies
    is started again, and programs go on. Messages go to `log_file` (a temporary one by default).
    The runtime ends with `shutdown`, with the `with` block, or with this process, however that
    ends.

    `warm_up`: generate once before anybody asks, so that what is made at the first use is there:
    True (as `rootlace serve --warm-up`), or an expression whose constraints will be asked for, such
    as `gen(type=Person)`.

    The constructor returns when the runtime can answer; `await Runtime.start(...)` leaves an event
    loop running meanwhile.

    Raises TypeError for an unknown option, ServerUnavailable (or the runtime's own typed error)
    when it does not start within `launch_timeout` seconds.
    """

    @with_keywords(
        keyword(
            setting.keyword,
            setting.type | None if setting.required else setting.type,
            setting.default,
        )
        for setting in settings(RuntimeConfig)
    )
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        model_path: str | Path | None = None,
        launch_timeout: float = 300.0,
        log_file: str | Path | None = None,
        warm_up: bool | Expression = False,
        **options: Any,
    ) -> None:
        if model is not None and model_path is not None:
            raise TypeError("Runtime() takes the model's folder once: model=... or model_path=...")
        folder = model or model_path or _embedded_model()
        uses = [] if isinstance(warm_up, bool) else first_uses(warm_up)
        if warm_up is True:
            options["warm_up"] = True
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="rootlace-"))
        self._process: GatewayProcess | None = None
        log = Path(log_file) if log_file else self._folder / "log.txt"
        try:
            address = f"ipc://{self._folder / 'program.sock'}"
            path, name = _local(folder, options)
            config = runtime_config(path, address, options, name)
            on_gone = self._give_up if options.get("state") else None
            self._started = GatewayProcess(config, log, launch_timeout, on_gone)
            self._process = self._started
            self.program_address: str = self._started.ready["program_address"]
            self.endpoint = RuntimeEndpoint(self.program_address, options.get("api_key"))
            generate_once(self.endpoint.connect(), uses)
        except BaseException:
            if self._process is not None:
                self._process.stop(grace=1.0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        atexit.register(self.shutdown)

    @classmethod
    async def start(cls, model: str | Path | None = None, **options: Any) -> Self:
        """`Runtime(...)` for an event loop, which goes on while the runtime starts. If the task is
        cancelled meanwhile, the runtime is stopped."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(1, thread_name_prefix="rootlace start")
        starting = pool.submit(cls, model, **options)
        pool.shutdown(wait=False)
        try:
            return await asyncio.shield(asyncio.wrap_future(starting))
        except asyncio.CancelledError:
            starting.add_done_callback(_stop)
            raise

    @property
    def pid(self) -> int:
        """Of the gateway's process."""
        return int(self._started.ready["pid"])

    @property
    def url(self) -> str | None:
        """Where HTTP is answered."""
        return self._started.ready.get("http_address") or None

    @property
    def model_name(self) -> str:
        return self.endpoint.get_model_name()

    def embed(
        self,
        texts: Sequence[Content],
        *,
        pooling: VectorKind | None = None,
        normalise: bool = True,
        adapter: str = "",
    ) -> list[list[float]]:
        """A vector for each text; see `RuntimeEndpoint.embed`."""
        return self.endpoint.embed(texts, pooling=pooling, normalise=normalise, adapter=adapter)

    async def async_embed(
        self,
        texts: Sequence[Content],
        *,
        pooling: VectorKind | None = None,
        normalise: bool = True,
        adapter: str = "",
    ) -> list[list[float]]:
        """`embed` for an event loop."""
        return await self.endpoint.async_embed(
            texts, pooling=pooling, normalise=normalise, adapter=adapter
        )

    def unpin(self, pin: str) -> None:
        """Let a pinned prompt go, by the `cache_pin` of its meta information."""
        self.endpoint.unpin(pin)

    def flush_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        self.endpoint.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        """The runtime's counters."""
        return self.endpoint.get_server_info()

    def cache_prefix(self, prefix: str) -> None:
        """Compute a text's KV now, for requests that will start with it."""
        if not prefix:
            raise InvalidRequest("an empty prefix cannot be cached")
        cached_text.cache(self.endpoint.connect(), [Text(prefix)])

    def shutdown(self, grace: float = 10.0) -> None:
        """Stop the runtime: what runs is cancelled. Killed if it takes over `grace` seconds.

        Does nothing in a fork of the process that started it.
        """
        process = self._process
        if process is None or os.getpid() != self._owner:
            return
        self._process = None
        atexit.unregister(self.shutdown)
        self.endpoint.close()
        process.stop(grace)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _give_up(self) -> None:
        """The gateway died too often: what waits for it is told."""
        self.endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        import asyncio

        await asyncio.to_thread(self.shutdown)

    def __repr__(self) -> str:
        return f"Runtime({self.program_address!r})"


def _stop(started: Future[R]) -> None:
    if started.exception() is None:
        started.result().shutdown()


def _local(model: str | Path, options: Mapping[str, Any]) -> tuple[str, str]:
    """Where the model is, and what clients call it, "" where its path says that."""
    from rootlace.runtime.model.hub.local import known_name, local_model

    allow_pickle = options.get("allow_pickle") is True
    path = Path(local_model(model, allow_pickle=allow_pickle)).expanduser()
    return str(path), known_name(model)


def _embedded_model() -> Path:
    from rootlace.runtime.assets import demo_model

    return demo_model()
