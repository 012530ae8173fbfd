"""Server process: `python -m rootlace.runtime.server`, started as a child process.

Reads its configuration as one JSON line from standard input. Prints one JSON line when it is ready
(or why it cannot start). Ends when standard input closes or on SIGINT. On SIGTERM running work may
end first.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys

import msgspec

from rootlace.runtime import processes
from rootlace.runtime.config import RuntimeConfig
from rootlace.runtime.model.checkpoint.config import check_config
from rootlace.runtime.model.checkpoint.source import servable_source
from rootlace.wire.errors import InternalError, InvalidRequest, RootlaceError

# A server whose loop hangs while it stops must not outlive its parent.
LAST_RESORT_SECONDS = 20.0


def main() -> int:
    processes.give_way()
    gc.disable()  # a tenth of a start: it makes many objects that stay, and garbage of few
    try:
        config = processes.read_config(sys.stdin.buffer, RuntimeConfig)
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        return _refuse(InvalidRequest(f"the configuration cannot be read: {error}"))
    try:
        executor = config.engine.executor
        source = servable_source(config.gateway.model, executor.allow_pickle)
        check_config(source, executor.ignore_config_keys)
        asyncio.run(_run(config))
    except RootlaceError as error:
        return _refuse(error)
    except Exception as error:
        return _refuse(InternalError(f"{type(error).__name__}: {error}"))
    return 0


async def _run(config: RuntimeConfig) -> None:
    # Only here: a model that is refused should not wait for a web server to be imported.
    from rootlace.runtime.server.app import Listening, serve_until

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_parent_end() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(stop.set)
        signal.setitimer(signal.ITIMER_REAL, LAST_RESORT_SECONDS)

    drain = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, drain.set)
    processes.call_when_parent_ends(sys.stdin.buffer, on_parent_end)

    def on_ready(listening: Listening) -> None:
        _print_line(msgspec.json.encode(listening))

    await serve_until([config], on_ready, stop, drain)


def _refuse(error: RootlaceError) -> int:
    _print_line(msgspec.json.encode({"error": error.code, "message": str(error)}))
    return 1


def _print_line(line: bytes) -> None:
    # The parent may be gone already.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line + b"\n")


if __name__ == "__main__":
    sys.exit(main())
