"""States of programs: the first parameter of a program, and the result of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, NoReturn, Self, overload

from rootlace.language.expressions import (
    Appendable,
    Expression,
    RoleBegin,
    RoleEnd,
    assistant,
    messages,
    system,
    tool,
    user,
)
from rootlace.language.tools import Offer, ToolCall, run_call, run_call_async
from rootlace.language.transcript import Branch, Saved, SavedBranch, read_json
from rootlace.language.variables import Awaited, Gathered, Readable, UnknownVariable, check_awaited
from rootlace.timeline import Timeline
from rootlace.types.partial_json import Beginning
from rootlace.wire.errors import InvalidRequest

# Forks --------------------------------------------------------------------------------------------


# sglang spells the last one `concate_and_append`.
_JOIN_MODES = ("gather_variable", "concate_and_append", "concatenate_and_append")


class Forks(Sequence[Any]):
    """Forked states, made by `s.fork(n)`: n states that grow separately or together.

    `forks[i]` is a state, and `forks["x"]` the list of every fork's `x`. `forks += ...` appends an
    expression to all forks. A list's element i, or a function's result `f(i)`, goes to fork i. As a
    context manager, joins at the end of the block.
    """

    def __init__(self, source: Any, size: int, adapter: str | None = None) -> None:
        if size < 1:
            raise InvalidRequest(f"fork() needs a size of at least 1, not {size}")
        self._states = [type(source)(branch) for branch in source.branch.fork(size, adapter)]
        self._source = source
        self._joined = False

    # ------------------------------------------------------------ a sequence of states

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states)

    def __getitem__(self, key: Any) -> Any:
        """Return a state (int), several states (slice), or every state's value of a variable (str).
        In an `async def` program, await the values of a variable."""
        if isinstance(key, str):
            return self.get_var(key)
        return self._states[key]

    def __setitem__(self, index: int, state: Any) -> None:
        # `forks[i] += x` ends with this assignment.
        if self._states[index] is not state:
            raise TypeError("a fork's states cannot be replaced")

    def get_var(self, name: str) -> Any:
        values = [state.branch.find(name) for state in self._states]
        return self._source._read_all(values, self)

    def __iadd__(self, other: Appendable | Sequence[Appendable] | Callable[[int], Any]) -> Self:
        if isinstance(other, (str, Expression)):
            for state in self._states:
                state.append(other)
        elif callable(other):
            for index, state in enumerate(self._states):
                state.append(other(index))
        elif isinstance(other, (list, tuple)):
            if len(other) != len(self._states):
                raise InvalidRequest(
                    f"{len(self._states)} forks cannot take a list of {len(other)} expressions"
                )
            for state, expression in zip(self._states, other, strict=True):
                state.append(expression)
        else:
            raise TypeError(
                "forks take an expression, a list of them or a function of the index, "
                f"not {type(other).__name__}"
            )
        return self

    # ------------------------------------------------------------ the end

    def join(self, mode: str = "gather_variable") -> None:
        """End the forks and bring back their results, without waiting.

        `"gather_variable"`: every variable that forks set becomes a list in the source state, in
        the order of the forks. `"concate_and_append"`: the server appends the forks' new texts to
        the source, in order.
        """
        if self._joined:
            raise InvalidRequest("these forks were joined before")
        if mode not in _JOIN_MODES:
            raise InvalidRequest(
                f"join mode must be 'gather_variable' or 'concate_and_append', not {mode!r}"
            )
        self._source.branch.join([state.branch for state in self._states], mode)
        self._joined = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and not self._joined:
            self.join()

    def __repr__(self) -> str:
        return f"Forks({len(self._states)})"


# State --------------------------------------------------------------------------------------------


class _Role:
    """Context manager of a message: `with s.user(): ...`."""

    def __init__(self, state: State, role: str) -> None:
        self._state = state
        self._role = role

    def __enter__(self) -> None:
        self._state.append(RoleBegin(self._role))

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._state.append(RoleEnd(self._role))


class _Scope:
    """Context manager of a variable: `with s.var_scope("x"): ...`. A scope may be entered again,
    for another block."""

    def __init__(self, state: State, name: str) -> None:
        self._state = state
        self._name = name

    def __enter__(self) -> None:
        self._start = self._state.branch.position()

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._state.branch.name_from(self._start, self._name)


class _Copy:
    """Context manager of one fork: `with s.copy() as c: ...`. The end of the block brings back the
    variables. (A generator would end the fork at a line of `contextlib`.)"""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def __enter__(self) -> Any:
        return self._forks.__enter__()[0]

    def __exit__(self, *error: Any) -> None:
        self._forks.__exit__(*error)


class Mark:
    """Position in a state, for `rollback`."""

    def __init__(self, branch: Branch) -> None:
        self.branch = branch


class Attempt:
    """Attempt of `State.retry`: a `with` block."""

    def __init__(self, last: bool, on: type[Exception] | tuple[type[Exception], ...]) -> None:
        self._last = last
        self._on = on
        self.succeeded = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.succeeded = kind is None
        return kind is not None and issubclass(kind, self._on) and not self._last


def offer_of(branch: Branch) -> Offer:
    """Take the latest generation's tools. Raises InvalidRequest if nothing new was generated."""
    offer = branch.take_offer()
    if offer is None:
        raise InvalidRequest("call_tools(): nothing new was generated with gen(tools=...)")
    return offer


class State:
    """Base of synchronous and asynchronous states: appending, forking, naming, following."""

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.ret_value: Any = None

    def append(self, expression: Appendable | Sequence[Mapping[str, Any]]) -> None:
        """Append text, an expression, or a list of messages such as `messages()` takes, as `s +=
        expression` does. The text of another state (`s += other.text()`) keeps its messages.

        Returns at once. Raises TypeError for anything else.
        """
        check_awaited(expression)
        if isinstance(expression, (list, tuple)):
            expression = messages(expression)
        if not isinstance(expression, (str, Expression)):
            raise TypeError(
                "a state takes strings and expressions (gen, select, user, ...), or messages, "
                f"not {'None' if expression is None else type(expression).__name__}; "
                "text(name) is a generated value as the model wrote it"
            )
        self.branch.append(expression)

    def __iadd__(self, expression: Appendable | Sequence[Mapping[str, Any]]) -> Self:
        self.append(expression)
        return self

    def system(self, content: Appendable | None = None) -> Any:
        """Append a system message, or open one: `with s.system():`."""
        return self._role("system", None if content is None else system(content))

    def user(self, content: Appendable | None = None) -> Any:
        """Append a user message, or open one: `with s.user():`."""
        return self._role("user", None if content is None else user(content))

    def assistant(self, content: Appendable | None = None) -> Any:
        """Append an assistant message, or open one: `with s.assistant():`."""
        return self._role("assistant", None if content is None else assistant(content))

    def tool(self, content: Appendable | None = None) -> Any:
        """Append a tool's result, or open a tool message: `with s.tool():`."""
        return self._role("tool", None if content is None else tool(content))

    def _role(self, role: str, message: Expression | None) -> Any:
        if message is None:
            return _Role(self, role)
        self.append(message)
        return message

    def var_scope(self, name: str) -> _Scope:
        """Return a `with` block whose text becomes the variable `name`."""
        return _Scope(self, name)

    def fork(
        self,
        size: int = 1,
        position_ids_offset: Sequence[int] | None = None,
        *,
        adapter: str | None = None,
    ) -> Forks:
        """Return `size` states that start at the end of this state, without waiting.

        The forks keep this state's adapter. `adapter` names another one ("": none), with which the
        prefix is computed anew, since adapters cannot share KV.

        `position_ids_offset` is accepted for sglang's programs and has no effect there either.
        """
        if not hasattr(size, "__index__"):
            raise TypeError(f"fork() needs a whole number of states, not {size!r}")
        return Forks(self, int(size), adapter)

    def mark(self) -> Mark:
        """Mark the end of the state for `rollback`, without waiting or computing."""
        return Mark(self.branch.mark())

    def rollback(self, mark: Mark) -> None:
        """Go back to the text, messages and variables at `mark`, any number of times. Later
        operations are cancelled and their failures forgotten."""
        if not isinstance(mark, Mark):
            raise TypeError(f"rollback() takes what mark() gave, not {type(mark).__name__}")
        self.branch.go_back(mark.branch)

    def retry(
        self, attempts: int, on: type[Exception] | tuple[type[Exception], ...] = Exception
    ) -> Iterator[Attempt]:
        """Yield attempts that begin at the present end, until one succeeds::

            for attempt in s.retry(3):
                with attempt:
                    s += rl.gen("sum", regex="[0-9]+")
                    check(s["sum"])

        A block that raises an exception of type `on` is rolled back and tried again. The last
        attempt's exception is raised. The prefix before the attempts is computed once. Attempt i
        adds i to each `seed` (with n samples, i times n).
        """
        if attempts < 1:
            raise InvalidRequest(f"retry() needs at least 1 attempt, not {attempts}")
        mark = self.mark()
        offset = self.branch.seed_offset
        for index in range(attempts):
            attempt = Attempt(index == attempts - 1, on)
            self.branch.seed_offset = offset * attempts + index
            try:
                yield attempt
            finally:  # also where the loop is left
                self.branch.seed_offset = offset
            if attempt.succeeded:
                return
            self.rollback(mark)

    def copy(self, position_ids_offset: Sequence[int] | None = None) -> _Copy:
        """Return a `with` block with one fork; the block's end brings back its variables."""
        return _Copy(self.fork(1, position_ids_offset))

    def set_var(self, name: str, value: Any) -> None:
        """Make `value` the variable `name`; also `s[name] = value`."""
        check_awaited(value)
        self.branch.set_variable(name, value)

    __setitem__ = set_var

    @staticmethod
    def from_json(text: str | bytes, types: Mapping[str, Any] | None = None) -> ProgramState:
        """Read a state that `to_json` wrote: readable, and `run(after=state)` continues from it.

        `types` gives the types of variables, {"person": Person}, and of `ret_value` as "return". A
        typed value without an entry stays plain JSON. Raises InvalidRequest for any other text.
        """
        return restored(read_json(text, types or {}))

    def __contains__(self, name: object) -> bool:
        """Return whether the program has named the variable, even if its value is not there yet."""
        return name in self.branch.variables

    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Yield `text_iter`'s text on an event loop, or with `return_meta_data` pairs (text, meta
        information).

        Every pair has text, the log-probabilities of its own tokens, and counts of all tokens so
        far. `get_meta_info` has the final information.
        """
        return self.branch.follow_async(var_name, return_meta_data)

    def trace(self) -> Timeline:
        """Return the timeline of the whole run so far, without waiting; `save("run.html")` makes a
        page. Raises InvalidRequest for a saved state."""
        return self.branch.timeline()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(variables={sorted(self.branch.variables)})"


class ProgramState(State):
    """State of an ordinary program, and result of a run. Picklable once the run has ended.

    Reading blocks until the value is there. Reading a failed value raises the ProgramError of its
    operation, or the program's own exception.
    """

    @property
    def ret_value(self) -> Any:
        """Return the program's returned value. Of `run(stream=True)`, waits for the end; of
        `run_async(stream=True)`, None before the end. Raises the error of a failed run."""
        self.branch.check_end()
        return self._value

    @ret_value.setter
    def ret_value(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """Return the value of a variable; a list for `gen(n=...)` and after a join.

        Raises KeyError for a name the program has not used. Raises ProgramError if its `gen`
        failed, or wrote a text that `gen(type=...)` cannot parse.
        """
        return _read(self.branch, name).get()

    def get(self, name: str, default: Any = None) -> Any:
        """Return `get_var(name)`, or `default` for a name the program has not used."""
        try:
            return self.get_var(name)
        except UnknownVariable:
            return default

    def keys(self) -> list[str]:
        """Return the names of all variables, after `sync`; `dict(state)` thus has the values."""
        self.sync()
        return list(self.branch.variables)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def _read_all(self, variables: Sequence[Readable], holder: object) -> list[Any]:
        gathered = Gathered(variables)
        self.branch.wait_for(gathered.requires())
        return gathered.get()

    def get_meta_info(self, name: str) -> Any:
        """Return token counts, finish reason, times and log-probabilities of a `gen` or `select`. A
        list of samples has a list; a variable set by the program has None."""
        return _read(self.branch, name).meta()

    @overload
    def text(self) -> str: ...
    @overload
    def text(self, name: str) -> Any: ...
    def text(self, name: str | None = None) -> Any:
        """Return the whole text, with roles in the model's template. With a name, return the
        variable's text, unparsed (a list of texts if the value is a list)."""
        if name is not None:
            return _read(self.branch, name).written()
        self.sync()
        return self.branch.text()

    def messages(self) -> list[dict[str, str]]:
        """Return the finished messages, as {"role", "content"}."""
        self.sync()
        return self.branch.messages()

    def call_tools(self, timeout: float | None = None) -> list[ToolCall]:
        """Run the tool calls of the latest `gen(tools=...)` in order, and append each result as a
        tool message. Return the calls; always none with `tool_choice="none"`.

        A tool's exception, unfit arguments and a cut-off call become text for the model. `timeout`
        (seconds) bounds each call: a slower function runs on in its thread, and its result is
        dropped. `async def` tools get a new event loop.
        """
        offer = offer_of(self.branch)
        self.branch.wait_for(offer.text.requires())
        done = []
        for call in offer.calls():
            done.append(run_call(call, offer.tools, timeout))
            self.branch.called(done[-1])
            self.append(tool(done[-1].result))
        return done

    def to_json(self) -> str:
        """Return the state as JSON text for `State.from_json`, after waiting for its end. Raises
        the program's failure, and InvalidRequest for a variable that JSON cannot hold."""
        return _saved(self).to_json()

    def __reduce__(self) -> Any:
        return restored, (_saved(self),)

    def sync(self) -> None:
        """Wait for all appended operations; raises nothing (see `error`)."""
        branch = self.branch
        branch.wait_for(branch.pending())

    def error(self) -> BaseException | None:
        """Return the program's error, or None; waits like `sync`."""
        self.sync()
        return self.branch.error()

    def text_iter(self, var_name: str | None = None) -> Generator[str, None, None]:
        """Yield the text, or one variable, as it is generated (a run with `stream=True`).

        Without streaming, yields all text at once. Raises at the end if the program failed, or
        never named the variable (KeyError). Leaving early (`break`, `close()`) cancels the run,
        unless another caller follows it or waits for a value.
        """
        if self.branch.streams:
            yield from self.branch.follow(var_name)
        else:
            yield self.text() if var_name is None else self.text(var_name)

    def value_iter(self, name: str) -> Generator[Any, None, None]:
        """Yield the growing value of `gen(name, type=...)` (a run with `stream=True`), at last the
        value itself. Partial values are dictionaries, lists, strings and numbers, parsed from the
        JSON so far."""
        beginning = Beginning()
        with closing(self.text_iter(name)) as pieces:
            for piece in pieces:
                yield from beginning.more(piece)
        yield self[name]

    async def value_async_iter(self, name: str) -> AsyncGenerator[Any, None]:
        """Yield `value_iter`'s values on an event loop."""
        beginning = Beginning()
        async with aclosing(self.text_async_iter(name)) as pieces:
            async for piece in pieces:
                for value in beginning.more(piece):
                    yield value
        yield self[name]

    def __str__(self) -> str:
        """Return the text, after waiting, or the `repr` of a failed state; `repr` does not wait."""
        return f"ProgramState({self.text()})" if self.error() is None else repr(self)


def _read(branch: Branch, name: str) -> Readable:
    """Return the variable `name`, after waiting for it."""
    variable = branch.find(name)
    branch.wait_for(variable.requires())
    return variable


def _saved(state: ProgramState) -> Saved:
    error = state.error()
    if error is not None:
        raise error
    return dataclasses.replace(state.branch.saved(), value=state.ret_value)


def restored(saved: Saved) -> ProgramState:
    """Make a state of `saved`."""
    state = ProgramState(SavedBranch(saved))
    state.ret_value = saved.value
    return state


# Asynchronous state -------------------------------------------------------------------------------


class AsyncProgramState(State):
    """State of an `async def` program: reading is awaited (`await s["x"]`). Methods do the same as
    those of `ProgramState`. A result used without `await` raises a ProgramError."""

    def __getitem__(self, name: str) -> Awaited:
        return Awaited(f"s[{name!r}]", self._value, name)

    def get_var(self, name: str) -> Awaited:
        return Awaited(f"s.get_var({name!r})", self._value, name)

    def get(self, name: str, default: Any = None) -> Awaited:
        async def value() -> Any:
            try:
                return await self._value(name)
            except UnknownVariable:
                return default

        return Awaited(f"s.get({name!r})", value)

    def keys(self) -> Awaited:
        return self._whole("s.keys()", lambda: list(self.branch.variables))

    def __iter__(self) -> NoReturn:
        # Without it, Python would ask for s[0], s[1] and so on without end.
        raise TypeError("in an `async def` program, `await s.keys()` has the variables' names")

    async def _value(self, name: str) -> Any:
        return (await self._read(name)).get()

    async def _read(self, name: str) -> Readable:
        branch = self.branch
        variable = branch.find(name)
        await branch.wait_for_async(variable.requires())
        return variable

    def _read_all(self, variables: Sequence[Readable], holder: object) -> Awaited:
        # `holder` keeps the forks alive while they are awaited: dropped ones are cancelled.
        async def values(holder: object) -> list[Any]:
            gathered = Gathered(variables)
            await self.branch.wait_for_async(gathered.requires())
            return gathered.get()

        return Awaited("forks[name]", values, holder)

    def get_meta_info(self, name: str) -> Awaited:
        async def meta() -> Any:
            return (await self._read(name)).meta()

        return Awaited(f"s.get_meta_info({name!r})", meta)

    def text(self, name: str | None = None) -> Awaited:
        async def written(name: str) -> Any:
            return (await self._read(name)).written()

        if name is None:
            return self._whole("s.text()", self.branch.text)
        return Awaited(f"s.text({name!r})", written, name)

    def messages(self) -> Awaited:
        return self._whole("s.messages()", self.branch.messages)

    def call_tools(self, timeout: float | None = None) -> Awaited:
        """Run the calls of one turn concurrently, ordinary functions in threads."""

        async def call() -> list[ToolCall]:
            import asyncio

            offer = offer_of(self.branch)
            await self.branch.wait_for_async(offer.text.requires())

            async def run(asked: ToolCall) -> ToolCall:
                done = await run_call_async(asked, offer.tools, timeout)
                self.branch.called(done)
                return done

            done = await asyncio.gather(*map(run, offer.calls()))
            for each in done:
                self.append(tool(each.result))
            return done

        return Awaited("s.call_tools()", call)

    async def sync(self) -> None:
        branch = self.branch
        await branch.wait_for_async(branch.pending())

    def error(self) -> Awaited:
        return self._whole("s.error()", self.branch.error)

    def _whole(self, what: str, value: Callable[[], Any]) -> Awaited:
        """Return a value that is read once all appended operations are over."""

        async def read() -> Any:
            await self.sync()
            return value()

        return Awaited(what, read)
