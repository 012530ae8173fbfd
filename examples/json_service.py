"""A web service that turns passages into JSON, and a client of it.

    python examples/json_service.py [--model NAME | --url URL] [--port PORT] [--serve]

Each request is a run of an `async def` program on the server's event loop, so thousands at once
need no thread. The type constrains every token, so the client always reads valid JSON. With --serve
the service continues after the client's three requests.

SmolLM2-135M copies fields out of one or two sentences. The model invents a missing field: the
type makes the answer valid, not true.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Annotated

import aiohttp
import msgspec
from aiohttp import web

import rootlace as rl
from backend import arguments, backend

PASSAGES = [
    "Ida Lund is 47 years old. She lives in Bergfeld.",
    "Karl Brandt lives in Norwick. Karl Brandt is 31 years old.",
    "Tom Lee is 25. He lives in Ulm.",
]


@dataclass
class Person:
    name: Annotated[str, msgspec.Meta(max_length=40)]
    age: Annotated[int, msgspec.Meta(ge=0, le=150)]
    city: Annotated[str, msgspec.Meta(max_length=40)]


@rl.function
async def extract(s: rl.AsyncProgramState, passage: str) -> None:
    s += rl.user(f"Extract name, age and city as JSON.\n\n{passage}")
    s += rl.assistant(rl.gen("person", type=Person, max_tokens=96, temperature=0))


async def serve_person(request: web.Request) -> web.Response:
    try:
        state = await extract.run_async(await request.text())
        return web.json_response(asdict(state["person"]))
    except rl.RootlaceError as error:
        return web.json_response({"error": str(error)}, status=error.http_status)


async def ask_all(url: str) -> None:
    """The client: all requests at once."""

    async def ask(session: aiohttp.ClientSession, passage: str) -> Person:
        async with session.post(url, data=passage) as response:
            response.raise_for_status()
            return msgspec.convert(await response.json(), Person)

    async with aiohttp.ClientSession() as session:
        people = await asyncio.gather(*(ask(session, passage) for passage in PASSAGES))
    for person in sorted(people, key=lambda person: person.age):
        print(f"{person.age}: {person.name} of {person.city}")


async def serve(port: int, forever: bool) -> None:
    app = web.Application()
    app.router.add_post("/person", serve_person)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/person"
    try:
        await ask_all(url)
        if forever:
            print(f"serving {url}, until Ctrl-C")
            await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--serve", action="store_true", help="go on serving")
    given = parser.parse_args()
    with backend(given):
        asyncio.run(serve(given.port, given.serve))


if __name__ == "__main__":
    main()
