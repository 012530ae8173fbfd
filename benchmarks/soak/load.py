"""Load of a thousand clients on a server, with checks of the answers.

Each client has its own connection, pauses, and asks for something: a chat, streamed or whole, which
it sometimes leaves in the middle; JSON by a new schema; text by a regular expression; samples with
a seed; a kept conversation; a wrong request. Beside these, programs fork. A repeated question must
get the same text, whatever else happened: the native kernels promise that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import jsonschema

import rootlace as rl

TASKS = 40
"""So many different questions are asked over and over."""
WORDS = ("red", "tea", "sun", "map", "old", "cat", "box", "sky", "pen", "war", "fox", "ink", "oak")
MAX_TOLD = 20


KILLED_TWICE = "the engine died twice while running this request"


class Wrong(Exception):
    """Raised for a wrong answer."""


class Blamed(Exception):
    """Raised when the engine was killed while the request ran alone, as a suspected killer."""


@dataclass
class Tally:
    """Counts of requests and outcomes."""

    done: Counter[str] = field(default_factory=Counter)
    left: int = 0
    """Streams that their clients left."""
    blamed: int = 0
    """Requests that were taken for what had killed the engine: at most one for each kill."""
    failed: int = 0
    told: list[str] = field(default_factory=list)
    """The first of the failures."""
    first: dict[str, str] = field(default_factory=dict)
    """The answer to each question that is asked again."""
    repeated: int = 0

    def same(self, question: str, text: str) -> None:
        """Raises Wrong if `question` had another answer before."""
        before = self.first.setdefault(question, text)
        self.repeated += 1
        if text != before:
            raise Wrong(f"{question}: {text!r}, and before {before!r}")

    def fail(self, kind: str, error: BaseException) -> None:
        self.failed += 1
        if len(self.told) < MAX_TOLD:
            self.told.append(f"{kind}: {type(error).__name__}: {error}"[:500])


class Client:
    """A client over HTTP, with its own connection."""

    def __init__(self, url: str, tally: Tally, dice: random.Random) -> None:
        self._url = url
        self._tally = tally
        self._dice = dice

    async def run(self, pause: float) -> None:
        """Ask until cancelled, with mean pauses of `pause` seconds."""
        connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=70)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            self._url, connector=connector, timeout=timeout
        ) as self._http:
            while True:
                await asyncio.sleep(self._dice.expovariate(1 / pause))
                await self.ask(self._dice.choices(KINDS, SHARES)[0])

    async def ask(self, kind: Callable[[Client], Awaitable[None]]) -> None:
        try:
            await kind(self)
        except Blamed:
            self._tally.blamed += 1
        except Exception as error:
            self._tally.fail(kind.__name__, error)
        else:
            self._tally.done[kind.__name__] += 1

    async def chat(self) -> None:
        """Ask a repeated question, whole."""
        number = self._dice.randrange(TASKS)
        body = _chat(_question(number), 24)
        answer = await self._post("/v1/chat/completions", body)
        self._tally.same(f"chat {number}", answer["choices"][0]["message"]["content"])

    async def stream(self) -> None:
        number = self._dice.randrange(TASKS)
        text, ended = await self._stream(_question(number), 32, None)
        if not ended:
            raise Wrong("the stream ended without a reason")
        self._tally.same(f"stream {number}", text)

    async def leave(self) -> None:
        """Leave a stream in the middle, or before it begins."""
        question = f"{_noise(self._dice, 40)} {_question(0)}"
        await self._stream(question, 300, self._dice.randrange(4))
        self._tally.left += 1

    async def schema(self) -> None:
        """Ask for JSON by a new schema."""
        names = [f"{word}{self._dice.randrange(100)}" for word in self._dice.sample(WORDS, 2)]
        kinds = [{"type": "boolean"}, {"enum": ["yes", "no", "perhaps"]}, {"type": "integer"}]
        properties = {name: self._dice.choice(kinds) for name in names}
        wanted = {
            "type": "object",
            "properties": properties,
            "required": names,
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
        body = {**_chat(_question(1), 60), "response_format": form}
        choice = (await self._post("/v1/chat/completions", body))["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), wanted)

    async def regex(self) -> None:
        number = self._dice.randrange(1000)
        pattern = f"[a-z]{{2,5}}-{number}(,[0-9a-f]{{2}}){{2,{2 + number % 3}}}"
        sampling = {"max_new_tokens": 40, "temperature": 0.0, "regex": pattern}
        body = {"text": _question(2), "sampling_params": sampling}
        answer = await self._post("/generate", body)
        if not re.fullmatch(pattern, answer["text"]):
            raise Wrong(f"{answer['text']!r} for {pattern}")
        self._tally.same(f"regex {number}", answer["text"])

    async def samples(self) -> None:
        """Ask for several samples with a seed, of a repeated prompt."""
        number = self._dice.randrange(TASKS)
        sampling = {"max_new_tokens": 12, "temperature": 1.0, "seed": number, "n": 2}
        body = {"text": _question(number), "sampling_params": sampling}
        answers = await self._post("/generate", body)
        self._tally.same(f"samples {number}", json.dumps([one["text"] for one in answers]))

    async def new(self) -> None:
        """Ask a long new prompt, which evicts others from the cache."""
        body = {"prompt": _noise(self._dice, 250), "max_tokens": 8, "temperature": 0}
        await self._post("/v1/completions", body)

    async def kept(self) -> None:
        """Hold a conversation that the server keeps: two turns, and its deletion."""
        first = {"input": _question(3), "max_output_tokens": 12}
        answer = await self._post("/v1/responses", first)
        second = {**first, "input": "Why?", "previous_response_id": answer["id"]}
        after = await self._post("/v1/responses", second)
        for one in (after, answer):
            async with self._http.delete(f"/v1/responses/{one['id']}") as reply:
                if reply.status != 200:
                    raise await _failure("DELETE", reply)

    async def wrong(self) -> None:
        """Send a request that is refused."""
        grammar = {"text": "a", "sampling_params": {"regex": "(" * self._dice.randrange(1, 9)}}
        for path, body in (
            ("/v1/completions", {"prompt": [10**6], "max_tokens": 1}),
            ("/v1/completions", {"prompt": "a", "temperature": -1}),
            ("/generate", grammar),
        ):
            async with self._http.post(path, json=body) as reply:
                said = await reply.text()
                if reply.status != 400:
                    raise Wrong(f"{path} answered {reply.status}: {said}")

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(path, json=body) as reply:
            if reply.status != 200:
                raise await _failure(path, reply)
            return await reply.json()

    async def _stream(self, question: str, tokens: int, events: int | None) -> tuple[str, bool]:
        """Return the text, and whether it ended; leave after so many events."""
        text, ended = [], False
        body = {**_chat(question, tokens), "stream": True}
        async with self._http.post("/v1/chat/completions", json=body) as reply:
            if reply.status != 200:
                raise await _failure("a stream", reply)
            async for line in reply.content:
                if events is not None and events <= 0:
                    reply.close()
                    return "", False
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        blamed = event["error"].get("message") == KILLED_TWICE
                        raise Blamed if blamed else Wrong(f"a stream said {event}")
                    (choice,) = event["choices"] or [{"delta": {}, "finish_reason": None}]
                    text.append(choice["delta"].get("content") or "")
                    ended = ended or choice["finish_reason"] is not None
                    if events is not None:
                        events -= 1
        return "".join(text), ended


KINDS = (
    Client.chat,
    Client.stream,
    Client.leave,
    Client.schema,
    Client.regex,
    Client.samples,
    Client.new,
    Client.kept,
    Client.wrong,
)
SHARES = (20, 20, 10, 10, 10, 10, 12, 5, 3)


@rl.function
async def debate(s: Any, number: int) -> str:
    """Run forks of forks, one of them cancelled, a choice, and a join."""
    s += rl.user(_question(number))
    forks = s.fork(3)
    forks += rl.assistant(rl.gen("opinion", max_tokens=10, temperature=0))
    lost = s.fork(1)
    lost += rl.assistant(rl.gen("lost", max_tokens=400, ignore_eos=True))
    below = forks[0].fork(2)
    below += rl.user("Why?") + rl.assistant(rl.gen("reason", max_tokens=8, temperature=0))
    s += rl.assistant(rl.select("verdict", ["yes", "no"]))
    opinions = [await fork["opinion"] for fork in forks]
    reasons = [await fork["reason"] for fork in below]
    return json.dumps([opinions, reasons, await s["verdict"]])


async def run_programs(backend: rl.RuntimeEndpoint, tally: Tally, dice: random.Random) -> None:
    """Run one program after the other until cancelled."""
    while True:
        number = dice.randrange(TASKS)
        try:
            state = await debate.run_async(number, backend=backend)
            tally.same(f"program {number}", state.ret_value)
        except Exception as error:
            if KILLED_TWICE in str(error):
                tally.blamed += 1
            else:
                tally.fail("program", error)
            await asyncio.sleep(1)
        else:
            tally.done["program"] += 1


@contextlib.asynccontextmanager
async def running(
    url: str, backend: rl.RuntimeEndpoint, clients: int, programs: int, pause: float, seed: int
) -> Any:
    """Run so many clients during the block; yield their `Tally`."""
    tally = Tally()
    dice = [random.Random(seed * 1_000_003 + number) for number in range(clients + programs)]
    jobs = [Client(url, tally, one).run(pause) for one in dice[:clients]]
    jobs += [run_programs(backend, tally, one) for one in dice[clients:]]
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        yield tally
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _failure(asked: str, reply: aiohttp.ClientResponse) -> Exception:
    said = await reply.text()
    return Blamed() if KILLED_TWICE in said else Wrong(f"{asked} answered {reply.status}: {said}")


def _chat(question: str, tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": question}
    return {"messages": [message], "max_tokens": tokens, "temperature": 0}


def _question(number: int) -> str:
    passage = "Ida Lund is 47 years old, lives in Oslo and likes chess. " * 4
    return f"{passage}{WORDS[number % len(WORDS)]} {number}: what does Ida like?"


def _noise(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(WORDS, k=words))
