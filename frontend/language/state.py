"""The state of a program: what its first parameter is, and what a run gives back."""

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
from rootlace.language.variables import (
    Awaited,
    Gathered,
    Readable,
    UnknownVariable,
    check_awaited,
)
from rootlace.timeline import Timeline
from rootlace.types.partial_json import Beginning
from rootlace.wire.errors import InvalidRequest

# Forks --------------------------------------------------------------------------------------------


# sglang spells the last one `concate_and_append`.
_JOIN_MODES = ("gather_variable", "concate_and_append", "concatenate_and_append")


class Forks(Sequence[Any]):
    """What `s.fork(n)` gives: n states, which grow one by one or all at once.

    `forks[i]` is a state and `forks["x"]` the list of all their `x`; `forks += ...` appends an
    expression to all, the i-th of a list to the i-th, or `f(i)` of a function. As a context manager
    it joins at the end of the block.
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
        """A state (int), some of them (slice), or every state's value of a variable (str).

        In an `async def` program, the values of a variable are awaited.
        """
        if isinstance(key, str):
            return self.get_var(key)
        return self._states[key]

    def __setitem__(self, index: int, state: Any) -> None:
        # `forks[i] += x` ends with this assignment.
        if self._states[index] is not state:
            raise TypeError("a fork's states cannot be replaced")

    def get_var(self, name: str) -> Any:
        found = [state.branch.find(name) for state in self._states]
        return self._source._read_all(found, self)

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
        """End the forks and bring back their results. Nothing is waited for.

        `"gather_variable"`: every variable that forks set becomes a list in the source state, in
        the order of the forks. `"concate_and_append"`: the texts the forks have gained are appended
        to the source, one after the other, by the server itself.
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
    """`with s.user(): ...`"""

    def __init__(self, state: State, role: str) -> None:
        self._state = state
        self._role = role

    def __enter__(self) -> None:
        self._state.append(RoleBegin(self._role))

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._state.append(RoleEnd(self._role))


class _Scope:
    """`with s.var_scope("x"): ...`: what is appended inside becomes the variable. One may be
    entered again, for another block."""

    def __init__(self, state: State, name: str) -> None:
        self._state = state
        self._name = name

    def __enter__(self) -> None:
        self._start = self._state.branch.position()

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._state.branch.name_from(self._start, self._name)


class _Copy:
    """`with s.copy() as c: ...`: a fork that ends with the block; its variables come back. (A
    generator would end it at a line of `contextlib`.)"""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def __enter__(self) -> Any:
        return self._forks.__enter__()[0]

    def __exit__(self, *error: Any) -> None:
        self._forks.__exit__(*error)


class Mark:
    """A place in a state that it can go back to."""

    def __init__(self, branch: Branch) -> None:
        self.branch = branch


class Attempt:
    """One of the attempts of `State.retry`, a `with` block."""

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
    """Take the tools of the latest generation. Raises InvalidRequest where nothing is new."""
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
        """Append as `s += expression` does: text, an expression, or a list of messages such as
        `messages()` gives. The text of another state (`s += other.text()`) keeps its messages.

        Returns at once; raises TypeError for anything else.
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
        """As a call, append a system message; as `with s.system():`, open one."""
        return self._role("system", None if content is None else system(content))

    def user(self, content: Appendable | None = None) -> Any:
        """As a call, append a user's message; as `with s.user():`, open one."""
        return self._role("user", None if content is None else user(content))

    def assistant(self, content: Appendable | None = None) -> Any:
        """As a call, append an assistant's message; as `with s.assistant():`, open one."""
        return self._role("assistant", None if content is None else assistant(content))

    def tool(self, content: Appendable | None = None) -> Any:
        """As a call, append a tool's result; as `with s.tool():`, open one."""
        return self._role("tool", None if content is None else tool(content))

    def _role(self, role: str, message: Expression | None) -> Any:
        if message is None:
            return _Role(self, role)
        self.append(message)
        return message

    def var_scope(self, name: str) -> _Scope:
        """A block whose text becomes the variable `name`."""
        return _Scope(self, name)

    def fork(
        self,
        size: int = 1,
        position_ids_offset: Sequence[int] | None = None,
        *,
        adapter: str | None = None,
    ) -> Forks:
        """`size` states that start where this one stands. Nothing is waited for.

        They have the adapter of this one, or the `adapter` of that name ("": none), with which
        their text so far is computed anew: what was computed with one adapter means nothing to
        another.

        `position_ids_offset` is accepted for sglang's programs and has no effect there either.
        """
        if not hasattr(size, "__index__"):
            raise TypeError(f"fork() needs a whole number of states, not {size!r}")
        return Forks(self, int(size), adapter)

    def mark(self) -> Mark:
        """Mark the end of the state for `rollback`. Nothing is waited for or computed."""
        return Mark(self.branch.mark())

    def rollback(self, mark: Mark) -> None:
        """Go back to `mark`, as often as you like: to its text, messages and variables. What was
        appended since is cancelled; what failed has never been."""
        if not isinstance(mark, Mark):
            raise TypeError(f"rollback() takes what mark() gave, not {type(mark).__name__}")
        self.branch.go_back(mark.branch)

    def retry(
        self, attempts: int, on: type[Exception] | tuple[type[Exception], ...] = Exception
    ) -> Iterator[Attempt]:
        """Attempts that begin where the state stands, until one succeeds::

            for attempt in s.retry(3):
                with attempt:
                    s += rl.gen("sum", regex="[0-9]+")
                    check(s["sum"])

        A block that raises an exception of `on` is rolled back and tried again; the last one's is
        raised. What stands before the attempts is computed once. Attempt i adds i to each `seed`
        (with n samples, i times n).
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
        """A fork for a `with` block, with which it ends; its variables come back."""
        return _Copy(self.fork(1, position_ids_offset))

    def set_var(self, name: str, value: Any) -> None:
        """Make `value` the variable `name`; also `s[name] = value`."""
        check_awaited(value)
        self.branch.set_variable(name, value)

    __setitem__ = set_var

    @staticmethod
    def from_json(text: str | bytes, types: Mapping[str, Any] | None = None) -> ProgramState:
        """The state that `to_json` wrote: it can be read, and `run(after=state)` goes on from it.

        A value of `gen(type=...)` comes back as its JSON says, or as what `types` says for the
        variable: {"person": Person}. So does `ret_value`, of which the name is "return". Raises
        InvalidRequest for any other text.
        """
        return restored(read_json(text, types or {}))

    def __contains__(self, name: object) -> bool:
        """Whether the program has named the variable; its value may still be on its way."""
        return name in self.branch.variables

    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncGenerator[Any, None]:
        """`text_iter` for an event loop; with `return_meta_data`, pairs of text and information.

        No pair is without text. Log-probabilities in a pair are those of its own tokens, counts
        those of all so far. `get_meta_info` has the final information.
        """
        return self.branch.follow_async(var_name, return_meta_data)

    def trace(self) -> Timeline:
        """What the whole run has done so far and when, of which `save("run.html")` makes a page.
        Waits for nothing. Raises InvalidRequest for a saved state."""
        return self.branch.timeline()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(variables={sorted(self.branch.variables)})"


class ProgramState(State):
    """The state of an ordinary program; what a run gives back. It can be pickled once it has ended.

    Reading blocks until the value is there. If it never will be, reading raises the ProgramError
    of the operation that failed, or what the program raised meanwhile.
    """

    @property
    def ret_value(self) -> Any:
        """What the program returned. Of `run(stream=True)`, waits for its end; of
        `run_async(stream=True)`, None before it. Raises what the run failed with."""
        self.branch.check_end()
        return self._value

    @ret_value.setter
    def ret_value(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """The value of a variable; a list for `gen(n=...)` and after a join.

        Raises KeyError for a name the program has not used, ProgramError if its `gen` failed or
        (`gen(type=...)`) wrote a text that is no value of the type.
        """
        return _read(self.branch, name).get()

    def get(self, name: str, default: Any = None) -> Any:
        """`get_var`, or `default` for a name the program has not used."""
        try:
            return self.get_var(name)
        except UnknownVariable:
            return default

    def keys(self) -> list[str]:
        """The names of all variables, waited for; with it, `dict(state)` has their values."""
        self.sync()
        return list(self.branch.variables)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def _read_all(self, variables: Sequence[Readable], holder: object) -> list[Any]:
        gathered = Gathered(variables)
        self.branch.wait_for(gathered.requires())
        return gathered.get()

    def get_meta_info(self, name: str) -> Any:
        """Token counts, finish reason, times and log-probabilities of a `gen` or `select`.

        A list where the value is one; None for a variable that was set by the program.
        """
        return _read(self.branch, name).meta()

    @overload
    def text(self) -> str: ...
    @overload
    def text(self, name: str) -> Any: ...
    def text(self, name: str | None = None) -> Any:
        """Everything in the state, roles included as the model sees them.

        With a name, that variable as the model wrote it: `get_var` without reading the text as a
        type (a list where the value is one).
        """
        if name is not None:
            return _read(self.branch, name).written()
        self.sync()
        return self.branch.text()

    def messages(self) -> list[dict[str, str]]:
        """The finished messages, as {"role", "content"}."""
        self.sync()
        return self.branch.messages()

    def call_tools(self, timeout: float | None = None) -> list[ToolCall]:
        """Run what the model called in the latest `gen(tools=...)`, one after the other, and append
        each result as a tool's message. Gives the calls; none if it called nothing, as always with
        `tool_choice="none"`.

        What a tool raises, arguments that it does not take and calls that were cut off are told to
        the model as text. `timeout` (seconds) bounds each call: a function that takes longer runs
        on in its thread, and nobody hears of its result. Tools that are `async def` get an event
        loop of their own.
        """
        offer = offer_of(self.branch)
        self.branch.wait_for(offer.said.requires())
        done = []
        for call in offer.calls():
            done.append(run_call(call, offer.tools, timeout))
            self.branch.called(done[-1])
            self.append(tool(done[-1].result))
        return done

    def to_json(self) -> str:
        """All that the state holds as JSON text: for `State.from_json`. Waits.

        Raises what the program failed with, and InvalidRequest for a variable that was set to
        something that JSON does not have.
        """
        return _saved(self).to_json()

    def __reduce__(self) -> Any:
        return restored, (_saved(self),)

    def sync(self) -> None:
        """Wait for everything that was appended; raises nothing (see `error`)."""
        branch = self.branch
        branch.wait_for(branch.pending())

    def error(self) -> BaseException | None:
        """The error of the program, or None; waits like `sync`."""
        self.sync()
        return self.branch.error()

    def text_iter(self, var_name: str | None = None) -> Generator[str, None, None]:
        """The text, or one variable, as it is generated (a run with `stream=True`).

        Without streaming, all of it at once. Raises at the end if the program failed, or never
        named the variable (KeyError). Who leaves before the end (`break`, `close()`) cancels the
        run, unless somebody else follows it or waits for a value.
        """
        if self.branch.streams:
            yield from self.branch.follow(var_name)
        else:
            yield self.text() if var_name is None else self.text(var_name)

    def value_iter(self, name: str) -> Generator[Any, None, None]:
        """The value of `gen(name, type=...)` while it is generated (a run with `stream=True`): what
        its JSON says so far, as dictionaries, lists, strings and numbers, whenever that is more;
        at last the value itself."""
        said = Beginning()
        with closing(self.text_iter(name)) as pieces:
            for piece in pieces:
                yield from said.more(piece)
        yield self[name]

    async def value_async_iter(self, name: str) -> AsyncGenerator[Any, None]:
        """`value_iter` for an event loop."""
        said = Beginning()
        async with aclosing(self.text_async_iter(name)) as pieces:
            async for piece in pieces:
                for value in said.more(piece):
                    yield value
        yield self[name]

    def __str__(self) -> str:
        """The text, waited for, or `repr` of what failed; `repr` waits for nothing."""
        return f"ProgramState({self.text()})" if self.error() is None else repr(self)


def _read(branch: Branch, name: str) -> Readable:
    """The variable `name`, waited for."""
    variable = branch.find(name)
    branch.wait_for(variable.requires())
    return variable


def _saved(state: ProgramState) -> Saved:
    error = state.error()
    if error is not None:
        raise error
    return dataclasses.replace(state.branch.saved(), value=state.ret_value)


def restored(saved: Saved) -> ProgramState:
    """The state of what was saved."""
    state = ProgramState(SavedBranch(saved))
    state.ret_value = saved.value
    return state


# Asynchronous state -------------------------------------------------------------------------------


class AsyncProgramState(State):
    """The state of an `async def` program: reading is awaited (`await s["x"]`).

    Its methods do what those of `ProgramState` do. What they give raises a ProgramError where it is
    used without `await`.
    """

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
        """The calls of one turn run side by side, ordinary functions in threads."""

        async def call() -> list[ToolCall]:
            import asyncio

            offer = offer_of(self.branch)
            await self.branch.wait_for_async(offer.said.requires())

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
        """A value that is read once all that was appended is over."""

        async def read() -> Any:
            await self.sync()
            return value()

        return Awaited(what, read)
