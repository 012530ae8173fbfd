"""`@function`: a Python function whose first parameter is a state becomes a program."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from rootlace.language import sampling
from rootlace.program.state import AsyncProgramState, ProgramState, State

if TYPE_CHECKING:
    from rootlace.program.prefix import SharedPrefix
    from rootlace.program.run import ProgramRun
    from rootlace.trace.graph import Trace

_RESERVED = frozenset({"backend", "stream"})


class Function:
    """A program. `run` it, `run_batch` it, `bind` some arguments, or `trace` it.

    Keyword arguments that are no parameters of the program are sampling defaults for every `gen` in
    it, under the names `gen` itself takes (`max_tokens` or `max_new_tokens`, `temperature`, ...).
    Where a parameter of the program has such a name, the argument is the program's. Anything else
    is a TypeError.
    """

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        functools.update_wrapper(self, func)
        self.func = func
        self.bind_arguments = dict(bound or {})
        self.is_async = inspect.iscoroutinefunction(func)
        self._signature = inspect.signature(func)
        parameters = list(self._signature.parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(f"{self.name}: the first parameter of a program is its state")
        self._parameters = parameters[1:]
        for parameter in self._parameters:
            if parameter.name in _RESERVED:
                raise TypeError(f"{self.name}: {parameter.name!r} is run()'s own argument")

    @property
    def name(self) -> str:
        return getattr(self.func, "__qualname__", repr(self.func))

    @property
    def arg_names(self) -> list[str]:
        """The program's parameters, without the state."""
        return [parameter.name for parameter in self._parameters]

    @property
    def required(self) -> list[str]:
        """The parameters without a default, in order; those behind them have one."""
        return [
            parameter.name
            for parameter in self._parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]

    def bind(self, **arguments: Any) -> Function:
        """The same program with some of its arguments fixed. Raises TypeError for unknown ones."""
        for name in arguments:
            if name not in self.arg_names:
                raise TypeError(f"{self.name}() has no parameter {name!r} to bind")
        return Function(self.func, {**self.bind_arguments, **arguments})

    # ------------------------------------------------------------ running

    def run(
        self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any
    ) -> ProgramState:
        """Run the program to its end and give its state.

        Raises what the program raises, and a ProgramError for an operation that failed although
        the program never read it. With `stream=True` it runs in a thread of its own and the state
        is given back at once: iterate `state.text_iter()`; errors are raised there. An `async def`
        program gets an event loop of its own here; use `run_async` where one is running.
        """
        values, options = self.split(kwargs)
        body = self.body(args, values)
        run = self._start(backend, options, stream)
        if stream:
            return self._run_in_thread(run, body)
        if self.is_async:
            return _own_loop(self.complete_async(run, body), self.name)
        return complete(run, body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`run`; inside a trace, trace."""
        from rootlace.trace.tracer import tracing

        outer = tracing()
        if outer is not None:
            return outer.call(self, args, kwargs)
        return self.run(*args, **kwargs)

    def stream(self, *args: Any, backend: Any = None, **kwargs: Any) -> Iterator[str]:
        """Run the program and yield its text as it comes. Closing the iterator cancels it."""
        return _text_of(self.run(*args, stream=True, backend=backend, **kwargs))

    async def run_async(
        self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any
    ) -> ProgramState:
        """Run an `async def` program on the running loop: thousands at once need no thread.

        With `stream=True` the program becomes a task and the state is given back at once; follow
        `state.text_async_iter()`. Raises TypeError for an ordinary program.
        """
        if not self.is_async:
            raise TypeError(f"{self.name} is not an `async def` program; use run() or run_batch()")
        values, options = self.split(kwargs)
        body = self.body(args, values)
        run = self._start(backend, options, stream)
        if stream:
            return self._run_in_task(run, body)
        return await self.complete_async(run, body)

    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the program once per element of `batch` (its arguments) and give the states in order.

        A program that fails disturbs no other: its state's `error()` says what happened, and
        reading from it raises. The constant beginning of the program is computed once. At most
        `num_threads` run at a time (for `async def` programs: coroutines, not threads). With
        `generator_style`, an iterator yields each state as soon as it and those before it are
        there. Ctrl-C cancels everything, on the server too.
        """
        from rootlace.program.batch import run_batch

        return run_batch(
            self, batch, num_threads, progress_bar, generator_style, backend, self._options(kwargs)
        )

    async def run_batch_async(
        self,
        batch: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        concurrency: int = 4096,
        backend: Any = None,
        **kwargs: Any,
    ) -> list[ProgramState]:
        """`run_batch` of an `async def` program on the running loop, without any thread."""
        from rootlace.program.batch import run_batch_async

        return await run_batch_async(self, batch, concurrency, backend, self._options(kwargs))

    # ------------------------------------------------------------ looking at it

    def trace(self, *args: Any, backend: Any = None, **kwargs: Any) -> Trace:
        """The program as a graph, without running it. Missing arguments stay symbolic."""
        from rootlace.trace.tracer import trace

        values, _ = self.split(kwargs)
        return trace(self, args, values)

    def cache(self, backend: Any = None) -> str:
        """Compute the program's constant beginning now, and give it ("" if there is none)."""
        from rootlace.program.batch import cache_prefix

        return cache_prefix(self, backend)

    # ------------------------------------------------------------ how

    def split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The program's own arguments, and sampling defaults under canonical names."""
        own = set(self.arg_names)
        greedy = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters)
        values: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in own or (greedy and name not in sampling.OPTIONS - sampling.EVERYDAY):
                values[name] = value
            else:
                options[name] = value
        return values, sampling.normalise(options, f"{self.name}()")

    def _options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return sampling.normalise(kwargs, f"{self.name}.run_batch()")

    def body(self, args: Sequence[Any], values: Mapping[str, Any]) -> Callable[[State], Any]:
        """The program with its arguments, ready for a state. TypeError if they do not fit."""
        merged = {**self.bind_arguments, **values}
        try:
            self._signature.bind(None, *args, **merged)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        return lambda state: self.func(state, *args, **merged)

    def _start(self, backend: Any, options: Mapping[str, Any], stream: bool) -> ProgramRun:
        from rootlace.client.default import endpoint_of
        from rootlace.program.run import ProgramRun

        return ProgramRun(endpoint_of(backend), options, stream=stream)

    def start_in_batch(
        self,
        backend: Any,
        options: Mapping[str, Any],
        prefix: SharedPrefix | None,
        program: str,
    ) -> ProgramRun:
        """A run that is one of many."""
        from rootlace.client.default import endpoint_of
        from rootlace.program.run import ProgramRun

        return ProgramRun(endpoint_of(backend), options, prefix=prefix, program=program)

    def _run_in_thread(self, run: ProgramRun, body: Callable[[State], Any]) -> ProgramState:
        from rootlace.program.branch import Branch

        state = ProgramState(Branch(run))

        def work() -> None:
            # The error is kept in the run, for whoever follows the stream.
            try:
                if self.is_async:
                    _own_loop(self.complete_async(run, body, state), self.name)
                else:
                    complete(run, body, state)
            except BaseException as error:
                if run.error is None:
                    run.conclude(error)

        run.thread = threading.Thread(target=work, name=f"rootlace {self.name}", daemon=True)
        run.thread.start()
        return state

    def _run_in_task(self, run: ProgramRun, body: Callable[[State], Any]) -> ProgramState:
        import asyncio

        from rootlace.program.branch import Branch

        state = ProgramState(Branch(run))
        task = asyncio.ensure_future(self.complete_async(run, body, state))
        # The error is kept in the run; looking at it here keeps asyncio from reporting it as lost.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        run.ended.add_callback(lambda: task)  # the loop itself holds tasks weakly
        return state

    async def complete_async(
        self, run: ProgramRun, body: Callable[[State], Any], state: ProgramState | None = None
    ) -> ProgramState:
        """Run `body` to its end on a new branch (or that of `state`)."""
        from rootlace.program.branch import Branch

        state = state or ProgramState(Branch(run))
        inner = AsyncProgramState(state.branch)
        state.ret_value = await run.execute_async(lambda: body(inner))
        return state

    def __repr__(self) -> str:
        return f"<rootlace.function {self.name}>"


def complete(
    run: ProgramRun, body: Callable[[State], Any], state: ProgramState | None = None
) -> ProgramState:
    """Run `body` to its end on a new branch (or that of `state`)."""
    from rootlace.program.branch import Branch

    state = state or ProgramState(Branch(run))
    state.ret_value = run.execute(functools.partial(body, state))
    return state


def _text_of(state: ProgramState) -> Iterator[str]:
    try:
        yield from state.text_iter()
    finally:
        if not state.branch.run.ended.done:
            state.branch.run.cancel()


def _own_loop(coroutine: Any, name: str) -> Any:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_looking_up(coroutine))
    coroutine.close()
    raise RuntimeError(f"{name}: an event loop is running here; await the `_async` method instead")


async def _looking_up(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run `coroutine`, and wake the loop now and then so that Ctrl-C is noticed."""
    import asyncio

    from rootlace.client.completion import LOOK_UP_SECONDS

    async def tick() -> None:
        while True:
            await asyncio.sleep(LOOK_UP_SECONDS)

    ticking = asyncio.ensure_future(tick())
    try:
        return await coroutine
    finally:
        ticking.cancel()


@overload
def function(func: Callable[..., Any]) -> Function: ...
@overload
def function(func: None = None, *, num_api_spec_tokens: int | None = None) -> Any: ...
def function(
    func: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None
) -> Any:
    """Make a program of a function whose first parameter is the state.

    Ordinary functions read with `s["x"]`, `async def` functions with `await s["x"]`.
    `num_api_spec_tokens` is accepted for sglang's programs: it saves calls to remote APIs there,
    and has nothing to save here.
    """
    return Function if func is None else Function(func)
