"""Decorator `@function`: makes a program of a Python function whose first parameter is a state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from rootlace.language import sampling
from rootlace.language.definition import Body, Definition
from rootlace.language.state import AsyncProgramState, ProgramState, State
from rootlace.language.variables import Awaited
from rootlace.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from rootlace.program.batch import Checkpoint
    from rootlace.program.run import ProgramRun
    from rootlace.trace import Trace


class Function(Definition):
    """Program, to `run`, `run_batch`, `bind` or `trace`.

    Keyword arguments that are no parameters of the program are sampling defaults for each of its
    `gen`s. They have the names of `gen`'s options (`max_tokens` or `max_new_tokens`, `temperature`,
    ...). The program's own parameter of such a name takes the argument. Any other name is a
    TypeError.
    """

    # ------------------------------------------------------------ running

    def run(
        self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any
    ) -> ProgramState:
        """Run the program to its end and return its state.

        Raises the program's own exception, or a ProgramError for a failed operation that the
        program did not read. With `stream=True` the program runs in a new thread and the state is
        returned at once: iterate `state.text_iter()`, which raises the errors. An `async def`
        program gets a new event loop here; use `run_async` on a running one.

        `timeout` (seconds) is that of the whole run. With `cache=rl.Cache(share=False)` the run
        neither uses nor leaves shared cached tokens. Otherwise `priority` and `cache` apply to each
        request.

        `adapter` (a keyword, of `stream` and the batches too): the LoRA adapter of the program's
        state, one of the runtime's loaded adapters. `after` (a keyword, of `stream` too): a state
        that has ended, of this or another program, or saved by `to_json`. The program continues its
        text, messages and variables; with the same model also its exact tokens, which the cache may
        still hold. `token_budget` (a keyword, of `stream` and the batches too, for each run): the
        number of tokens that the run may generate, lost forks included; a generation beyond the
        budget fails.
        """
        from rootlace.program import batch

        run, body = self._start(args, kwargs, backend, stream)
        if stream:
            return batch.run_in_thread(run, body, self.name, self.is_async)
        if self.is_async:
            return batch.complete_in_own_loop(run, body, self.name)
        return batch.complete(run, body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on another program's state, or else `run` it (inside a trace, trace it).

        `found = inner(s, "a question")` appends the program's text to `s`, and returns a state as
        `run` does. The state has the program's own variables (`found["answer"]`), and its returned
        value as `ret_value`. Await an `async def` program: `found = await inner(s, ...)`. Keywords
        that are no parameters are sampling defaults, before the caller's.
        """
        if args and isinstance(args[0], State):
            return self._run_on(args[0], args[1:], kwargs)
        from rootlace.trace import tracing

        outer = tracing()
        if outer is not None:
            return outer.call(self, args, kwargs)
        return self.run(*args, **kwargs)

    def stream(self, *args: Any, backend: Any = None, **kwargs: Any) -> Generator[str, None, None]:
        """Run the program and yield its growing text. Closing the iterator cancels the run."""
        return self.run(*args, stream=True, backend=backend, **kwargs).text_iter()

    async def run_async(
        self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any
    ) -> ProgramState:
        """Run an `async def` program on the running loop; thousands of runs need no thread.

        With `stream=True` the program becomes a task and the state is returned at once; follow
        `state.text_async_iter()`. Raises TypeError for an ordinary program.
        """
        if not self.is_async:
            raise TypeError(f"{self.name} is not an `async def` program; use run() or run_batch()")
        from rootlace.program import batch

        run, body = self._start(args, kwargs, backend, stream)
        if stream:
            return batch.run_in_task(run, body)
        return await batch.complete_async(run, body)

    def run_batch(
        self,
        batch: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        checkpoint: Checkpoint | str | Path | None = None,
        backend: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the program once per element of `batch` (its arguments) and return the states in
        order. An iterator is read to its end first.

        A program that fails affects no other: its state's `error()` is the reason, and reading the
        state raises. The program's constant prefix is computed once. At most `num_threads` run at a
        time (for `async def` programs: coroutines, not threads). With `generator_style`, an
        iterator yields the states in order, each as soon as possible. Ctrl-C cancels all runs, on
        the server too.

        `checkpoint`: a file to which each finished row's state is appended. Run an interrupted
        batch again with the same file to continue. Rows in the file with the same arguments,
        options and model are read, not run. Typed values are then as `State.from_json` reads them:
        `Checkpoint(path, types={...})`. `Checkpoint(path, keep="value")` keeps only the returned
        values. A row that JSON cannot hold causes a warning, and is run again the next time.
        """
        from rootlace.program.batch import run_batch

        return run_batch(
            self,
            batch,
            num_threads,
            progress_bar,
            generator_style,
            backend,
            {**self._options(kwargs), "checkpoint": checkpoint},
        )

    async def run_batch_async(
        self,
        batch: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        concurrency: int = 4096,
        checkpoint: Checkpoint | str | Path | None = None,
        backend: Any = None,
        **kwargs: Any,
    ) -> list[ProgramState]:
        """Run `run_batch` of an `async def` program on the running loop, without any thread."""
        from rootlace.program.batch import run_batch_async

        options = {**self._options(kwargs), "checkpoint": checkpoint}
        return await run_batch_async(self, batch, concurrency, backend, options)

    # ------------------------------------------------------------ looking at it

    def trace(self, *args: Any, backend: Any = None, **kwargs: Any) -> Trace:
        """Return the program's graph, without running it. Missing arguments stay symbolic."""
        from rootlace.trace import trace

        _, rest = self.take("adapter", kwargs)
        values, _ = self.split(rest)
        return trace(self, args, values)

    def cache(self, backend: Any = None, adapter: str | None = None) -> str:
        """Compute the program's constant prefix now, for runs with this `adapter`. Return the
        prefix, or "" if there is none."""
        from rootlace.program.batch import cache_prefix

        return cache_prefix(self, backend, adapter)

    # ------------------------------------------------------------ how

    def _run_on(self, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        values, options = self.split(kwargs)
        body = self.body(args, values)
        if self.is_async and not isinstance(state, AsyncProgramState):
            raise TypeError(f"{self.name} is an `async def` program: only such a program calls it")
        inner = type(state)(state.branch.scope(self.name, options))
        if not self.is_async:
            inner.ret_value = body(inner)
            return inner

        async def complete() -> State:
            inner.ret_value = await body(inner)
            return inner

        return Awaited(f"{self.plain_name}(s)", complete)

    def _options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return sampling defaults (canonical names), and the runs' adapter and token budget."""
        adapter, kwargs = self.take("adapter", kwargs)
        token_budget, kwargs = self.take("token_budget", kwargs)
        options = sampling.normalise(kwargs, f"{self.name}.run_batch()")
        return {**options, "adapter": adapter, "token_budget": token_budget}

    def _start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], backend: Any, stream: bool
    ) -> tuple[ProgramRun, Body]:
        """Return a run of the program, and the program with its arguments."""
        from rootlace.client.endpoint import endpoint_of
        from rootlace.program.run import ProgramRun

        adapter, kwargs = self.take("adapter", kwargs)
        after, kwargs = self.take("after", kwargs)
        token_budget, kwargs = self.take("token_budget", kwargs)
        values, options = self.split(kwargs)
        body = self.body(args, values)
        if after is not None:
            body = _resumed(body, after)
        endpoint = endpoint_of(backend)
        return ProgramRun(
            endpoint,
            options,
            stream=stream,
            adapter=adapter,
            token_budget=token_budget,
            name=self.plain_name,
        ), body

    def __repr__(self) -> str:
        return f"<rootlace.function {self.name}>"


def _resumed(body: Body, after: ProgramState) -> Body:
    """Return `body`, run after the contents of the ended state `after`."""
    if not isinstance(after, ProgramState):
        raise TypeError(f"after= takes a state that a run gave, not {type(after).__name__}")
    if not all(operation.done for operation in after.branch.pending()):
        raise InvalidRequest("the state given as after= has not ended: wait for it (state.sync())")
    error = after.error()
    if error is not None:
        raise error
    saved = after.branch.saved()

    def resumed(state: State) -> Any:
        state.branch.restore(saved)
        return body(state)

    return resumed


@overload
def function(func: Callable[..., Any]) -> Function: ...
@overload
def function(func: None = None, *, num_api_spec_tokens: int | None = None) -> Any: ...
def function(
    func: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None
) -> Any:
    """Make a program of a function whose first parameter is the state.

    Ordinary functions read with `s["x"]`, `async def` functions with `await s["x"]`.
    `num_api_spec_tokens` is accepted for sglang's programs, without effect: sglang saves calls to
    remote APIs with it.
    """
    return Function if func is None else Function(func)
