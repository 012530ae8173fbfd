"""Runtime that a program starts for itself: the server, and with it the engine, as a child."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from rootlace.client.channel import Channel
from rootlace.client.endpoint import RuntimeEndpoint, cache, close, compute
from rootlace.language import sampling
from rootlace.language.expressions import Expression, Gen, items
from rootlace.language.sampling import keyword, with_keywords
from rootlace.runtime.config import RuntimeConfig, runtime_config, settings
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest, RootlaceError, ServerUnavailable, from_code
from rootlace.wire.protocol import Text

if TYPE_CHECKING:
    from concurrent.futures import Future


# Gateway process ----------------------------------------------------------------------------------
#
# The server as a child of this process.


GATEWAY_MODULE = "rootlace.runtime.server"
MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 300.0
_LOG_TAIL_LINES = 20


class GatewayProcess:
    """Server as a child: starts with a `RuntimeConfig` (nested dictionaries), is `ready`, and can
    be stopped. The child's log goes to the file `log`.

    With `on_gone`, a dead child is started again, up to `MAX_RESTARTS` times in
    `RESTART_WINDOW_SECONDS`; then `on_gone` is called.

    Raises ServerUnavailable, or the child's own typed error, if it does not start within `timeout`
    seconds.
    """

    def __init__(
        self,
        config: dict[str, Any],
        log: Path,
        timeout: float,
        on_gone: Callable[[], object] | None = None,
    ) -> None:
        self._config = config
        self._log = log
        self._timeout = timeout
        self._lock = threading.Lock()
        self._stopped = False
        self._log.write_bytes(b"")
        self._process = self._spawn()
        try:
            self.ready = self._wait_ready(self._process)
        except BaseException:
            self.stop(grace=1.0)
            raise
        if on_gone is not None:
            watching = threading.Thread(target=self._keep_up, args=(on_gone,), daemon=True)
            watching.start()

    def stop(self, grace: float) -> None:
        """End the child; kill it if it takes over `grace` seconds. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            process = self._process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for end in (lambda: None, process.terminate, process.kill):
            end()
            try:
                process.wait(timeout=grace)
                return
            except subprocess.TimeoutExpired:
                grace = 2.0

    def _spawn(self) -> subprocess.Popen[str]:
        with self._log.open("a") as log:
            # A session of its own: Ctrl-C in the terminal is for the program, which cancels what
            # it runs. The runtime ends when its standard input does.
            return subprocess.Popen(
                [sys.executable, "-m", GATEWAY_MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _wait_ready(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=_read_ready, args=(process.stdout, lines), daemon=True).start()
        try:
            process.stdin.write(json.dumps(self._config) + "\n")
            process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # the child died or was stopped: the reader finds its output ended
        try:
            ready = lines.get(timeout=self._timeout)
        except queue.Empty:
            raise ServerUnavailable(
                f"the runtime was not ready after {self._timeout:g} s{self._log_tail()}"
            ) from None
        if ready is None:
            code = process.wait(timeout=10)
            raise ServerUnavailable(
                f"the runtime ended with status {code} before it was ready{self._log_tail()}"
            )
        if "error" in ready:
            raise from_code(str(ready["error"]), f"{ready.get('message')}{self._log_tail()}")
        return ready

    def _keep_up(self, on_gone: Callable[[], object]) -> None:
        """Start the child again whenever it has died."""
        deaths: list[float] = []
        while True:
            self._process.wait()
            now = time.monotonic()
            deaths = [*(t for t in deaths if now - t < RESTART_WINDOW_SECONDS), now]
            with self._lock:
                if self._stopped:
                    return
                if len(deaths) > MAX_RESTARTS:
                    break
                process = self._process = self._spawn()
            try:
                self.ready = self._wait_ready(process)
            except (RootlaceError, subprocess.TimeoutExpired):
                process.kill()
        on_gone()

    def _log_tail(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        except OSError:
            return ""
        return "".join(f"\n  | {line}" for line in lines)


def _read_ready(output: IO[str], lines: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Pass on the first line that is a JSON object, then read on to keep the pipe empty."""
    is_ready = False
    for line in output:
        if is_ready or not line.startswith("{"):
            continue
        try:
            lines.put(json.loads(line))
            is_ready = True
        except ValueError:
            continue
    if not is_ready:
        lines.put(None)


# Warm up ------------------------------------------------------------------------------------------
#
# Generating once as a program will, so that the runtime has made all that this needs.


_TOKENS = 8


def first_uses(what: Expression) -> list[Gen]:
    """Return each `gen` in an expression. Raises TypeError for one without any."""
    uses = [item for item in items(what) if isinstance(item, Gen)]
    if not uses:
        raise TypeError("warm_up takes True or an expression with a gen(...)")
    return uses


def generate_once(connection: Channel, gens: Sequence[Gen]) -> None:
    """Generate a few tokens for each `gen`. Raises the runtime's typed errors."""
    answers = []
    for each in gens:
        options = {"temperature": 0.0, **each.options, "max_tokens": _TOKENS, "min_tokens": 0}
        chosen = sampling.resolve({}, options)
        generate = partial(protocol.Generate, params=chosen.params, constraint=chosen.constraint)
        branch, sent = compute(connection, [Text("Hello")], last=generate)
        close(connection, branch)
        answers += sent
    for answer in answers:
        answer.get()


# Runtime ------------------------------------------------------------------------------------------


R = TypeVar("R", bound="Runtime")


class Runtime(RuntimeEndpoint):
    """Runtime started for `model` (also `model_path`), and the connection to it. A model is a
    folder or GGUF file, or a name that `rootlace models` lists (`smollm2`). A name on the Hugging
    Face hub (`Qwen/Qwen3-0.6B`) is downloaded where the cache lacks it.

    The default is the embedded demo model.

    `adapters` are PEFT's folders, by name: {"formal": "path/to/folder"}.

    The options are fields of `rootlace.runtime.config`, explained there and by `rootlace serve
    --help`; sglang's names for them work too. With `state`, a folder, a server that dies is started
    again, and programs go on. Messages go to `log_file` (a temporary one by default). The runtime
    ends with `shutdown`, with the `with` block, or with this process, however the process ends.

    `warm_up`: generate once at the start, so that the first program does not wait for first uses.
    True (as `rootlace serve --warm-up`), or an expression with the constraints of later programs,
    such as `gen(type=Person)`.

    The constructor returns when the runtime can answer; `await Runtime.start(...)` leaves an event
    loop running meanwhile.

    Raises TypeError for an unknown option. Raises ServerUnavailable (or the runtime's own typed
    error) if it does not start within `launch_timeout` seconds.
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
            if options.get("draft_model"):
                options["draft_model"] = _local(options["draft_model"], options)[0]
            try:
                config = runtime_config(path, address, options, name)
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"Runtime(): {error}") from None
            # Programs that wait for a server get an error once it has died too often.
            on_gone = super().close if options.get("state") else None
            self._started = GatewayProcess(config, log, launch_timeout, on_gone)
            self._process = self._started
            self.program_address: str = self._started.ready["program_address"]
            super().__init__(self.program_address, options.get("api_key"))
            generate_once(self.connect(), uses)
        except BaseException:
            if self._process is not None:
                self._process.stop(grace=1.0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        atexit.register(self.shutdown)

    @classmethod
    async def start(cls, model: str | Path | None = None, **options: Any) -> Self:
        """Start a `Runtime` while the event loop goes on. If the task is cancelled meanwhile, the
        runtime is stopped."""
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
        """Process id of the server."""
        return int(self._started.ready["pid"])

    @property
    def url(self) -> str | None:
        """Address of the HTTP server; None without one."""
        return self._started.ready.get("http_address") or None

    @property
    def model_name(self) -> str:
        return self.get_model_name()

    def cache_prefix(self, prefix: str) -> None:
        """Compute a text's KV now, for requests that will start with it."""
        if not prefix:
            raise InvalidRequest("an empty prefix cannot be cached")
        cache(self.connect(), [Text(prefix)])

    def shutdown(self, grace: float = 10.0) -> None:
        """Stop the runtime and cancel its work; kill it if that takes over `grace` seconds.

        Does nothing in a fork of the process that started it.
        """
        process = self._process
        if process is None or os.getpid() != self._owner:
            return
        self._process = None
        atexit.unregister(self.shutdown)
        super().close()
        process.stop(grace)
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Close the connection, and `shutdown`."""
        super().close()
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
    """(Path of the model, name for clients: "" where the path names the model)."""
    from rootlace.runtime.model.hub.local import known_name, local_model

    allow_pickle = options.get("allow_pickle") is True
    path = Path(local_model(model, allow_pickle=allow_pickle)).expanduser()
    return str(path), known_name(model)


def _embedded_model() -> Path:
    from rootlace.runtime.assets import demo_model

    return demo_model()
