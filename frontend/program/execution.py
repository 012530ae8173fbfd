"""Running one program: here, in a thread of its own, or as a task of the running event loop."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

from rootlace.client.channel import LOOK_UP_SECONDS
from rootlace.language.async_state import AsyncProgramState
from rootlace.language.definition import Body
from rootlace.language.state import ProgramState
from rootlace.program.branch import Branch
from rootlace.program.run import ProgramRun


def complete(run: ProgramRun, body: Body, state: ProgramState | None = None) -> ProgramState:
    """Run `body` to its end on a new branch (or that of `state`)."""
    state = state or ProgramState(Branch(run))
    state.ret_value = run.execute(functools.partial(body, state))
    return state


async def complete_async(
    run: ProgramRun, body: Body, state: ProgramState | None = None
) -> ProgramState:
    """The same for an `async def` program."""
    state = state or ProgramState(Branch(run))
    inner = AsyncProgramState(state.branch)
    state.ret_value = await run.execute_async(lambda: body(inner))
    return state


def complete_in_own_loop(
    run: ProgramRun, body: Body, name: str, state: ProgramState | None = None
) -> ProgramState:
    """The same where no event loop is running."""
    result: ProgramState = in_own_loop(complete_async(run, body, state), name)
    return result


def run_in_thread(run: ProgramRun, body: Body, name: str, is_async: bool) -> ProgramState:
    """Start the program in a thread of its own. An error is kept in the run, for whoever follows
    the stream."""
    state = ProgramState(Branch(run))

    def work() -> None:
        try:
            if is_async:
                complete_in_own_loop(run, body, name, state)
            else:
                complete(run, body, state)
        except BaseException as error:
            if run.error is None:
                run.conclude(error)

    run.thread = threading.Thread(target=work, name=f"rootlace {name}", daemon=True)
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


def text_of(run: ProgramRun, state: ProgramState) -> Iterator[str]:
    """The text as it comes. Closing the iterator cancels the program."""
    try:
        yield from state.text_iter()
    finally:
        if not run.ended.done:
            run.cancel()


def in_own_loop(coroutine: Coroutine[Any, Any, Any], name: str) -> Any:
    """The outcome of `coroutine`. Raises RuntimeError where an event loop is running already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_interruptible(coroutine))
    coroutine.close()
    raise RuntimeError(f"{name}: an event loop is running here; await the `_async` method instead")


async def _interruptible(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run `coroutine`, and wake the loop now and then so that Ctrl-C is noticed."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(LOOK_UP_SECONDS)

    ticking = asyncio.ensure_future(tick())
    try:
        return await coroutine
    finally:
        ticking.cancel()
