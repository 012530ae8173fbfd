"""Running of one program on many arguments."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import inspect
import os
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import msgspec

from rootlace.client import endpoint as cached_text
from rootlace.client.channel import LOOK_UP_SECONDS
from rootlace.client.endpoint import endpoint_of
from rootlace.language import sampling
from rootlace.language.definition import Body, Definition
from rootlace.language.failures import warn
from rootlace.language.sampling import read_handling
from rootlace.language.state import AsyncProgramState, ProgramState, State, restored
from rootlace.language.tools import Tools
from rootlace.language.transcript import Saved, returned
from rootlace.program.branch import Branch
from rootlace.program.run import ProgramRun, SharedPrefix, merge
from rootlace.trace import Reference, constant_prefix
from rootlace.types import encoded
from rootlace.wire.errors import InvalidRequest, RootlaceError

if TYPE_CHECKING:
    from rootlace.client.endpoint import RuntimeEndpoint


# One program --------------------------------------------------------------------------------------


def complete(run: ProgramRun, body: Body, state: ProgramState | None = None) -> ProgramState:
    """Run `body` to its end on a new branch (or that of `state`)."""
    state = state or ProgramState(Branch(run))

    def work() -> None:
        state.ret_value = body(state)  # before the run's end wakes its followers

    run.execute(work)
    return state


async def complete_async(
    run: ProgramRun, body: Body, state: ProgramState | None = None
) -> ProgramState:
    """Run an `async def` program as `complete` does."""
    state = state or ProgramState(Branch(run))

    async def work() -> None:
        state.ret_value = await body(AsyncProgramState(state.branch))

    await run.execute_async(work)
    return state


def complete_in_own_loop(
    run: ProgramRun, body: Body, name: str, state: ProgramState | None = None
) -> ProgramState:
    """Run an `async def` program in a new event loop."""
    result: ProgramState = in_own_loop(complete_async(run, body, state), name)
    return result


def run_in_thread(run: ProgramRun, body: Body, name: str, is_async: bool) -> ProgramState:
    """Start the program in a new thread. The run keeps an error for followers of the stream."""
    state = ProgramState(Branch(run))

    def work() -> None:
        try:
            if is_async:
                complete_in_own_loop(run, body, name, state)
            else:
                complete(run, body, state)
        except BaseException as error:
            if not run.ended.done:
                run.conclude(error)

    context = contextvars.copy_context()
    run.thread = threading.Thread(
        target=context.run, args=(work,), name=f"rootlace {name}", daemon=True
    )
    run.thread.start()
    return state


def run_in_task(run: ProgramRun, body: Body) -> ProgramState:
    """Start an `async def` program as a task. An error is kept in the run."""
    state = ProgramState(Branch(run))
    task = asyncio.ensure_future(complete_async(run, body, state))
    # Looking at the error here keeps asyncio from reporting it as lost.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    run.ended.add_callback(lambda: task)  # the loop itself holds tasks weakly
    return state


def in_own_loop(coroutine: Coroutine[Any, Any, Any], name: str) -> Any:
    """Return the result of `coroutine`. Raises RuntimeError if an event loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_interruptible(coroutine))
    coroutine.close()
    raise RuntimeError(f"{name}: an event loop is running here; await the `_async` method instead")


async def _interruptible(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run `coroutine`, and wake the loop regularly so that Ctrl-C is noticed."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(LOOK_UP_SECONDS)

    ticking = asyncio.ensure_future(tick())
    try:
        return await coroutine
    finally:
        ticking.cancel()


# Checkpoint ---------------------------------------------------------------------------------------
#
# File of a running batch: a line of JSON for each finished row.


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint file of `run_batch(checkpoint=...)` for finished rows. `types` are the types of
    variables and of the returned value, for reading rows (`State.from_json`).

    `keep="value"` writes only the program's returned value, easy to read for other tools. A row
    read from such a file has `ret_value`, but no text or variables.
    """

    path: str | Path
    types: Mapping[str, Any] = field(default_factory=dict)
    keep: Literal["state", "value"] = "state"

    def __post_init__(self) -> None:
        if self.keep not in ("state", "value"):
            raise InvalidRequest(f"Checkpoint(keep=...) is 'state' or 'value', not {self.keep!r}")


class _Line(msgspec.Struct):
    """Finished row: its number, its key, and its kept contents."""

    row: int
    key: str
    state: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Journal:
    """Open file of a checkpoint. A row's key covers the program, its bound arguments and object,
    the model and the batch's options. The key also covers the row's arguments. A row with a changed
    key, a failed row and an unreadable one are run again."""

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path,
        program: Definition,
        model: str,
        options: Mapping[str, Any],
        batch: Sequence[Any],
    ) -> None:
        """Open the file and read its rows. `model` is a name; `options` are `run_batch`'s, under
        canonical names. Raises InvalidRequest for arguments that JSON cannot hold."""
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        about = (program.name, model, _what_matters(options))
        bound = (program.bind_arguments,) if program.bind_arguments else ()
        if inspect.ismethod(program.func):
            bound = (*bound, program.func.__self__)
        self._keys = [_key((*about, *bound, row), index) for index, row in enumerate(batch)]
        self._lock = threading.Lock()
        self._model = model
        self._keep = checkpoint.keep
        path = Path(checkpoint.path)
        self.done: dict[int, ProgramState] = {}
        """Rows that need not be run."""
        if path.exists():
            self._read(path, checkpoint.types)
        self._file: IO[bytes] = path.open("ab")
        if self._file.tell() and not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # behind a line that was cut off

    def _read(self, path: Path, types: Mapping[str, Any]) -> None:
        with path.open("rb") as lines:
            for text in lines:
                try:
                    line = msgspec.json.decode(text, type=_Line)
                    if 0 <= line.row < len(self._keys) and self._keys[line.row] == line.key:
                        self._take(line, types)
                except (msgspec.DecodeError, InvalidRequest):
                    continue

    def _take(self, line: _Line, types: Mapping[str, Any]) -> None:
        if self._keep == "state" and line.state is not msgspec.UNSET:
            self.done[line.row] = State.from_json(bytes(line.state), types)
        elif self._keep == "value" and line.value is not msgspec.UNSET:
            value = returned(msgspec.json.decode(line.value), types)
            self.done[line.row] = restored(Saved(self._model, (), {}, value))

    def add(self, index: int, state: ProgramState) -> None:
        """Write the finished row `index`, from any thread. A failed row is not written; a row that
        JSON cannot hold causes a warning. Both are run again the next time."""
        if state.error() is not None:
            return
        try:
            line = msgspec.json.encode(self._line(index, state))
        except (RootlaceError, msgspec.MsgspecError, TypeError, ValueError, RecursionError) as odd:
            warn(f"batch[{index}] is done, but the checkpoint cannot keep it: {odd}")
            return
        with self._lock:
            if not self._file.closed:  # else the batch was cancelled
                self._file.write(line + b"\n")
                self._file.flush()

    def _line(self, index: int, state: ProgramState) -> _Line:
        line = _Line(index, self._keys[index])
        if self._keep == "value":
            line.value = msgspec.Raw(encoded(state.ret_value))
        else:
            line.state = msgspec.Raw(state.to_json().encode())
        return line

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _what_matters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that change the generated text, as JSON values."""
    settings = {
        name: value
        for name, value in options.items()
        if name in sampling.PARAMS or name in ("adapter", "token_budget", sampling.TOOL_CHOICE)
    }
    if "logit_bias" in settings:  # JSON sorts no keys that are numbers
        settings["logit_bias"] = sorted(settings["logit_bias"].items())
    tools = options.get("tools")
    if isinstance(tools, Tools):  # the backend says how its model is told of them
        settings["tools"] = [tool.definition() for tool in tools]
    else:
        settings["constraint"] = sampling.constraint(options)
    return {name: value for name, value in settings.items() if value is not None}


def _key(about: tuple[Any, ...], index: int) -> str:
    try:
        written = encoded(about, order="sorted")
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"batch[{index}]: a checkpoint needs arguments that JSON can hold: {error}"
        ) from None
    return hashlib.sha256(written).hexdigest()[:32]


# Batch --------------------------------------------------------------------------------------------


class _Batch:
    """Programs of one call: their shared prefix and options, and the running ones."""

    def __init__(
        self,
        function: Definition,
        endpoint: RuntimeEndpoint,
        options: Mapping[str, Any],
        batch: Sequence[Any],
    ) -> None:
        self._function = function
        self._endpoint = endpoint
        self._options = dict(options)
        self._adapter: str | None = self._options.pop("adapter", None)
        self._token_budget: int | None = self._options.pop("token_budget", None)
        checkpoint = self._options.pop("checkpoint", None)
        self._connection = endpoint.connect()
        model = self._connection.model.name
        self._journal = (
            None if checkpoint is None else Journal(checkpoint, function, model, options, batch)
        )
        self._program = self._connection.next_program()
        self._running: set[ProgramRun] = set()
        self._lock = threading.Lock()
        self._cancelled = False
        share = read_handling(self._options, "run_batch()").cache.share
        left = len(batch) - (0 if self._journal is None else len(self._journal.done))
        self._prefix = (
            self._open_prefix(common_arguments(function, batch))
            if left > 1 and share and self._connection.model.caching
            else None
        )

    def _open_prefix(self, common: Mapping[str, Any]) -> SharedPrefix | None:
        chat = self._connection.model.chat
        texts = merge(constant_prefix(self._function, chat, common))
        if not texts:
            return None
        try:
            # A prefix that fails (too long, say) fails the programs themselves, with their lines.
            branch, _ = cached_text.compute(self._connection, texts, self._program, self._adapter)
        except InvalidRequest:
            return None
        return SharedPrefix(branch, texts)

    def start(self) -> ProgramRun:
        run = ProgramRun(
            self._endpoint,
            self._options,
            prefix=self._live_prefix(),
            program=self._program,
            adapter=self._adapter,
            token_budget=self._token_budget,
            name=self._function.plain_name,
        )
        with self._lock:
            self._running.add(run)
        run.ended.add_callback(lambda: self._forget(run))
        if self._cancelled:
            run.cancel()
        return run

    def _live_prefix(self) -> SharedPrefix | None:
        """Return the prefix, unless the batch's connection, which holds it, was replaced."""
        return self._prefix if self._endpoint.connect() is self._connection else None

    def _forget(self, run: ProgramRun) -> None:
        with self._lock:
            self._running.discard(run)

    def cancel(self) -> None:
        """Abort the running programs, and each one that still starts."""
        self._cancelled = True
        with self._lock:
            running = list(self._running)
        for run in running:
            run.cancel()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._prefix is not None and self._connection.lost is None:
            cached_text.close(self._connection, self._prefix.branch, cancel=self._cancelled)

    def done(self, index: int) -> ProgramState | None:
        """Return the state of a row that was run before."""
        return None if self._journal is None else self._journal.done.get(index)

    def run_one(self, index: int, body: Body) -> ProgramState:
        """Run one program to its end; its failure stays in its state."""
        done = self.done(index)
        if done is not None:
            return done
        with self._row(index) as (run, state):
            complete(run, body, state)
        return state

    async def run_one_async(self, index: int, body: Body) -> ProgramState:
        done = self.done(index)
        if done is not None:
            return done
        with self._row(index) as (run, state):
            await complete_async(run, body, state)
        return state

    @contextmanager
    def _row(self, index: int) -> Iterator[tuple[ProgramRun, ProgramState]]:
        """Yield a run for one row, and its state, which the checkpoint keeps at the end."""
        run = self.start()
        state = ProgramState(Branch(run))
        try:
            yield run, state
        except Exception:
            # `run.error` has the exception, for `state.error()` and for readers of the state.
            assert run.error is not None
        if self._journal is not None:
            self._journal.add(index, state)


def bodies(function: Definition, batch: Iterable[Any]) -> tuple[list[Any], list[Body]]:
    """Read the whole batch, and check every element's arguments before anything runs. Raises
    TypeError naming the element."""
    if isinstance(batch, (str, Mapping)) or not isinstance(batch, Iterable):
        what = type(batch).__name__
        raise TypeError(f"run_batch() takes a list of dictionaries or tuples, not one {what}")
    rows, checked = list(batch), []
    for index, arguments in enumerate(rows):
        try:
            if isinstance(arguments, Mapping):
                checked.append(function.body((), arguments))
            elif isinstance(arguments, (list, tuple)):
                checked.append(function.body(arguments, {}))
            else:
                raise TypeError(f"a dictionary or a tuple, not {type(arguments).__name__}")
        except TypeError as error:
            raise TypeError(f"batch[{index}]: {error}") from None
    return rows, checked


def common_arguments(function: Definition, batch: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments for tracing the shared prefix: constants of the whole batch, and
    references for the others."""
    rows = [
        arguments
        if isinstance(arguments, Mapping)
        else dict(zip(function.arg_names, arguments, strict=False))
        for arguments in batch
    ]
    common: dict[str, Any] = {}
    for name in {name: None for row in rows for name in row}:
        values = [row.get(name, _MISSING) for row in rows]
        same = all(_same(value, values[0]) for value in values)
        common[name] = values[0] if same else Reference(name)
    return common


_MISSING = object()


def _same(one: Any, other: Any) -> bool:
    # Only types with a cheap equality that means "writes the same text" are compared.
    return one is other or (type(one) is type(other) is str and one == other)


def run_batch(
    function: Definition,
    batch: Iterable[Any],
    num_threads: str | int,
    progress_bar: bool,
    generator_style: bool,
    backend: Any,
    options: Mapping[str, Any],
) -> Any:
    """Implement `Function.run_batch`."""
    rows, todo = bodies(function, batch)
    width = _width(num_threads, len(todo))
    endpoint = endpoint_of(backend)
    if function.is_async:
        if generator_style:
            raise InvalidRequest("generator_style is for ordinary programs")
        coroutine = run_batch_async(
            function,
            rows,
            4096 if num_threads == "auto" else width,
            endpoint,
            options,
            progress_bar,
        )
        return in_own_loop(coroutine, function.name)
    results = _in_threads(function, todo, width, progress_bar, endpoint, options, rows)
    return results if generator_style else list(results)


def _width(num_threads: str | int, size: int) -> int:
    if num_threads == "auto":
        return min(max(96, 16 * (os.cpu_count() or 1)), max(size, 1))
    if not isinstance(num_threads, int) or num_threads < 1:
        raise InvalidRequest(f"num_threads must be 'auto' or at least 1, not {num_threads!r}")
    return min(num_threads, max(size, 1))


def _in_threads(
    function: Definition,
    todo: list[Body],
    width: int,
    progress_bar: bool,
    endpoint: RuntimeEndpoint,
    options: Mapping[str, Any],
    batch: Sequence[Any],
) -> Iterator[ProgramState]:
    if not todo:
        return
    shared = _Batch(function, endpoint, options, batch)
    pool = ThreadPoolExecutor(width, thread_name_prefix=f"rootlace {function.name}")
    try:
        with _progress(progress_bar, function.name, len(todo)) as advance:
            futures: list[Future[ProgramState]] = []
            for index, body in enumerate(todo):
                context = contextvars.copy_context()
                future = pool.submit(context.run, shared.run_one, index, body)
                future.add_done_callback(lambda _: advance())
                futures.append(future)
            futures.reverse()
            while futures:
                yield _result(futures.pop())
    except BaseException:  # Ctrl-C, or a generator that is closed before its end
        pool.shutdown(wait=False, cancel_futures=True)
        shared.cancel()
        raise
    finally:
        pool.shutdown(wait=False)
        shared.close()


def _result(future: Future[ProgramState]) -> ProgramState:
    while True:
        try:
            return future.result(timeout=LOOK_UP_SECONDS)
        except TimeoutError:
            if future.done():
                return future.result()  # the TimeoutError may be the program's own


async def run_batch_async(
    function: Definition,
    batch: Iterable[Any],
    concurrency: int,
    backend: Any,
    options: Mapping[str, Any],
    progress_bar: bool = False,
) -> list[ProgramState]:
    """Implement `Function.run_batch_async`."""
    import asyncio

    if not function.is_async:
        raise TypeError(f"{function.name} is not an `async def` program; use run_batch()")
    if concurrency < 1:
        raise InvalidRequest(f"concurrency must be at least 1, not {concurrency}")
    rows, todo = bodies(function, batch)
    if not todo:
        return []
    results: list[ProgramState | None] = [None] * len(todo)
    async with _closing(_Batch(function, endpoint_of(backend), options, rows)) as shared:
        with _progress(progress_bar, function.name, len(todo)) as advance:
            remaining = iter(enumerate(todo))

            async def work() -> None:
                for index, body in remaining:
                    results[index] = await shared.run_one_async(index, body)
                    advance()

            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(todo))):
                    group.create_task(work())
    return [state for state in results if state is not None]


@asynccontextmanager
async def _closing(shared: _Batch) -> AsyncIterator[_Batch]:
    try:
        yield shared
    except BaseException:
        shared.cancel()
        raise
    finally:
        shared.close()


@contextmanager
def _progress(shown: bool, name: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call once per finished program."""
    if not shown:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress() as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)


def cache_prefix(function: Definition, backend: Any, adapter: str | None) -> str:
    """Implement `Function.cache`."""
    endpoint = endpoint_of(backend)
    connection = endpoint.connect()
    texts = merge(constant_prefix(function, connection.model.chat))
    if not texts:
        return ""
    cached_text.cache(connection, texts, adapter)
    return "".join(text.text for text in texts)
