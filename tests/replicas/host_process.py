"""A host of an engine as a process of its own: the stub of the folder given as the argument.

It writes a line to standard output for each address that it wants, and reads it from its input.
"""

import asyncio
import sys

import msgspec

from rootlace.runtime import processes
from rootlace.runtime.config import EngineConfig
from rootlace.runtime.replicas.remote import Host, LineAddress
from tests.engine.stub_engine import main as stub_engine


async def main(folder: str) -> None:
    def stub(module: str) -> list[str]:
        return [sys.executable, "-m", stub_engine.__module__, folder]

    async def attach() -> LineAddress | None:
        print("?", flush=True)
        line = await asyncio.to_thread(sys.stdin.readline)
        return msgspec.json.decode(line, type=LineAddress | None)

    processes.child_command = stub
    await Host(EngineConfig(), bytes(16), attach).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
