"""The state of an `async def` program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from rootlace.language import tool_calls
from rootlace.language.expressions import tool
from rootlace.language.state import State, offer_of
from rootlace.language.tool_calls import ToolCall
from rootlace.language.variables import Awaited, Gathered, Readable, UnknownVariable


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
        async def names() -> list[str]:
            await self.sync()
            return list(self.branch.variables)

        return Awaited("s.keys()", names)

    def __iter__(self) -> NoReturn:
        # Without it, Python would ask for s[0], s[1] and so on without end.
        raise TypeError("in an `async def` program, `await s.keys()` has the variables' names")

    async def _value(self, name: str) -> Any:
        return (await self._read(name)).get()

    async def _read(self, name: str) -> Readable:
        reader = self.branch.reader
        variable = reader.find(name)
        await reader.wait_for_async(variable.requires())
        return variable

    def _read_all(self, variables: Sequence[Readable], holder: object) -> Awaited:
        # `holder` keeps the forks alive while they are awaited: dropped ones are cancelled.
        async def values(holder: object) -> list[Any]:
            gathered = Gathered(variables)
            await self.branch.reader.wait_for_async(gathered.requires())
            return gathered.get()

        return Awaited("forks[name]", values, holder)

    def get_meta_info(self, name: str) -> Awaited:
        async def meta() -> Any:
            return (await self._read(name)).meta()

        return Awaited(f"s.get_meta_info({name!r})", meta)

    def text(self, name: str | None = None) -> Awaited:
        async def text() -> Any:
            if name is not None:
                return (await self._read(name)).written()
            await self.sync()
            return self.branch.reader.text()

        return Awaited(f"s.text({'' if name is None else repr(name)})", text)

    def messages(self) -> Awaited:
        async def messages() -> list[dict[str, str]]:
            await self.sync()
            return self.branch.reader.messages()

        return Awaited("s.messages()", messages)

    def call_tools(self, timeout: float | None = None) -> Awaited:
        """The calls of one turn run side by side, ordinary functions in threads."""

        async def call() -> list[ToolCall]:
            import asyncio

            offer = offer_of(self.branch)
            await self.branch.reader.wait_for_async(offer.said.requires())

            async def run(asked: ToolCall) -> ToolCall:
                done = await tool_calls.run_async(asked, offer.tools, timeout)
                self.branch.called(done)
                return done

            done = await asyncio.gather(*map(run, offer.calls()))
            for each in done:
                self.append(tool(each.result))
            return done

        return Awaited("s.call_tools()", call)

    async def sync(self) -> None:
        reader = self.branch.reader
        await reader.wait_for_async(reader.pending())

    def error(self) -> Awaited:
        async def error() -> BaseException | None:
            await self.sync()
            return self.branch.reader.error()

        return Awaited("s.error()", error)
