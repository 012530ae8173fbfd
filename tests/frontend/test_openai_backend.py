"""Programs on a server that has only OpenAI's interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import rootlace as rl
from rootlace.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServerUnavailable,
    Unauthorized,
)


@dataclass
class Person:
    name: str


class Server:
    """A server that answers with `reply(body)`: a text, or a status and a body."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.reply: Callable[[dict[str, Any]], Any] = lambda body: " Hi."
        self.missing = 0
        """How many bytes of its replies it does not send."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say(200, {"data": [{"id": "first"}, {"id": "second"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((self.path, body))
                said = server.reply(body)
                if not isinstance(said, str):
                    self.say(*said)
                elif body["stream"]:
                    self.stream(said)
                else:
                    kind = "message" if "messages" in body else "text"
                    texts = [said] * body.get("n", 1)
                    self.say(200, {"choices": list(map(choice(kind), range(9), texts)), **USAGE})

            def say(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data) + server.missing))
                self.end_headers()
                self.wfile.write(data)

            def stream(self, said: str) -> None:
                self.send_response(200)
                self.end_headers()
                for letter in said:
                    event = json.dumps({"choices": [choice("delta")(0, letter)]})
                    self.wfile.write(f"data: {event}\n\n".encode())
                self.wfile.write(f"data: {json.dumps(USAGE)}\n\ndata: [DONE]\n\n".encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.handle_error = lambda *_: None  # clients may not wait for answers
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


USAGE = {
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
}


def choice(kind: str) -> Callable[[int, str], dict[str, Any]]:
    def made(index: int, text: str) -> dict[str, Any]:
        content = {"text": text} if kind == "text" else {kind: {"content": text}}
        return {"index": index, "finish_reason": "length", **content}

    return made


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.stop()


@pytest.fixture
def backend(server: Server) -> Iterator[rl.OpenAIBackend]:
    made = rl.OpenAIBackend(server.url, api_key="k")
    rl.set_default_backend(made)
    yield made
    rl.set_default_backend(None)
    made.close()


@rl.function
def chat(s, question):
    s += rl.system("Be brief.") + rl.user(question)
    with s.fork(2) as forks:
        forks += rl.assistant(rl.gen("tip", max_tokens=5, temperature=0, stop="\n"))
    s += rl.assistant(rl.gen("answer"))
    return s["tip"], s["answer"]


def test_what_is_named_is_sent_if_it_is_the_default(
    server: Server, backend: rl.OpenAIBackend
) -> None:
    """A named default is sent, as the server's may differ; others are left to the server."""

    @rl.function
    def ask(s: rl.State) -> None:
        s += rl.user("Hi") + rl.assistant(rl.gen("answer", temperature=1.0, frequency_penalty=0))
        s += rl.user("Hi") + rl.assistant(rl.gen("again"))

    ask.run(top_p=1)
    (_, first), (_, second) = server.asked
    drawn = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
    assert {name: first[name] for name in drawn if name in first} == {
        "temperature": 1.0,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
    }
    assert {name: second[name] for name in drawn if name in second} == {"top_p": 1.0}


def test_messages_become_chats(server: Server, backend: rl.OpenAIBackend) -> None:
    state = chat.run("Hello <|end|>")
    assert state.ret_value == ([" Hi.", " Hi."], " Hi.")
    tips = [asked for asked in server.asked if "temperature" in asked[1]]
    path, body = tips[0]  # "answer" needs no tip, so the server may get "answer" first
    assert path == "/v1/chat/completions" and len(tips) == 2
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello <|end|>"},
    ]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("first", 5, 0.0)
    assert body["stop"] == ["\n"] and "top_p" not in body
    meta = state.get_meta_info("answer")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (7, 5, 2)
    assert meta["finish_reason"]["type"] == "length"
    later = chat.run("More?", after=state)
    assert len(later.messages()) == 6
    assert [m["role"] for m in server.asked[-1][1]["messages"]][:3] == [
        "system",
        "user",
        "assistant",
    ]


async def test_text_streams_and_values(server: Server, backend: rl.OpenAIBackend) -> None:
    @rl.function
    def plain(s):
        s += "Once" + rl.gen("x", n=2) + " and" + rl.gen("y")

    @rl.function
    async def typed(s):
        s += rl.user("Who?") + rl.assistant(rl.gen("person", type=Person))

    assert plain.run().text() == "Once Hi. and Hi."
    assert [(path, body["prompt"]) for path, body in server.asked] == [
        ("/v1/completions", "Once"),
        ("/v1/completions", "Once Hi. and"),
    ]
    server.reply = lambda body: '{"name": "Ida"}'
    state = await typed.run_async(stream=True)
    seen = [value async for value in state.value_async_iter("person")]
    assert {"name": "Id"} in seen and seen[-1] == Person("Ida")
    form = server.asked[-1][1]["response_format"]["json_schema"]
    assert form["strict"] and form["schema"]["$defs"]["Person"]["required"] == ["name"]


@pytest.mark.parametrize(
    ("appended", "reason"),
    [
        (rl.user("?") + rl.assistant(rl.select("x", ["a"])), "select"),
        (rl.user("?") + rl.assistant(rl.gen("x", regex="a")), "of the kind regex"),
        (rl.user("?") + rl.assistant("So: " + rl.gen("x")), "cannot go on with one"),
        (rl.user("?") + rl.gen("x"), "stands in an assistant's message"),
        (rl.user("?") + "between" + rl.assistant(rl.gen("x")), "text outside of messages"),
        ("x" + rl.gen("x", json_schema={}), "in an assistant's message only"),
        ("x" + rl.gen("x", logprobs=True), "log-probabilities cannot"),
        (rl.ids([1]) + rl.gen("x"), "token ids mean nothing"),
        ("Before." + rl.user("?") + rl.assistant(rl.gen("x")), "text outside of messages"),
        ("x" + rl.gen("x", cache=rl.Cache(pin=True)), "a pin or ttl"),
        ("x" + rl.gen("x", cache=rl.Cache(ttl=60)), "a pin or ttl"),
    ],
)
def test_what_cannot_be_asked_fails_at_its_line(
    backend: rl.OpenAIBackend, appended: rl.Tools, reason: str
) -> None:
    @rl.function
    def program(s):
        s += appended

    with pytest.raises(rl.ProgramError, match=reason) as caught:
        program.run()
    assert isinstance(caught.value.__cause__, InvalidRequest)
    assert caught.value.filename == __file__


def test_what_a_branch_cannot_have_fails_at_its_line(
    server: Server, backend: rl.OpenAIBackend
) -> None:
    @rl.function
    def program(s):
        s += "x"
        s.fork(1)[0].append(rl.gen("y", cache=rl.Cache(pin="try")))
        s += rl.gen("x")

    @rl.function
    def forked(s):
        s += "x"
        s.fork(1, adapter="a")

    for options, reason in (
        ({"cache": rl.Cache(share=False)}, "share=False"),
        ({"adapter": "a"}, "adapter cannot"),
    ):
        with pytest.raises(rl.ProgramError, match=reason) as caught:
            program.run(**options)
        assert isinstance(caught.value.__cause__, InvalidRequest)
        assert (caught.value.filename, caught.value.function) == (__file__, "program")
    with pytest.raises(rl.ProgramError, match="adapter cannot") as caught:
        forked.run()
    assert caught.value.what == "opening a branch" and not server.asked
    assert program.run(backend=backend)["x"] == " Hi."


def test_a_backend_that_was_closed(server: Server) -> None:
    @rl.function
    def program(s):
        s += "Once" + rl.gen("x") + rl.gen("y")

    made = rl.OpenAIBackend(server.url, concurrency=1)
    going, end = threading.Event(), threading.Event()

    def reply(body: Any) -> str:
        going.set()
        end.wait(60)
        return "a"

    server.reply = reply
    first, second = (program.run(backend=made, stream=True) for _ in range(2))
    assert going.wait(60)
    made.close()
    end.set()
    for state in (first, second, None):
        with pytest.raises(rl.ProgramError, match="was closed") as caught:
            (state or program.run(backend=made))["y"]
        assert isinstance(caught.value.__cause__, ServerUnavailable)


def test_a_message_that_has_begun_goes_on(server: Server) -> None:
    @rl.function
    def program(s):
        s += rl.user("?") + rl.assistant("So:" + rl.gen("x"))

    program.run(backend=rl.OpenAIBackend(server.url, "m", continues=True))
    body = server.asked[0][1]
    assert body["messages"][-1] == {"role": "assistant", "content": "So:"}
    assert body["continue_final_message"] and not body["add_generation_prompt"]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ((401, {"error": {"message": "who?"}}), Unauthorized),
        ((429, {"error": {"message": "who?"}}), Overloaded),
        ((500, {"error": {"message": "who?"}}), ServerUnavailable),
        ((200, []), ServerUnavailable),
    ],
)
def test_errors_of_the_server(
    server: Server, backend: rl.OpenAIBackend, said: Any, error: type
) -> None:
    server.reply = lambda body: said
    with pytest.raises(rl.ProgramError, match=r"who\?|something else") as caught:
        chat.run("Hello")
    assert isinstance(caught.value.__cause__, error)


def test_answers_that_are_cut_off(server: Server, backend: rl.OpenAIBackend) -> None:
    server.missing = 1
    with pytest.raises(rl.ProgramError, match="IncompleteRead") as caught:
        chat.run("Hello")
    assert isinstance(caught.value.__cause__, ServerUnavailable)


def test_samples_that_do_not_come_and_answers_that_come_too_late(
    server: Server, backend: rl.OpenAIBackend
) -> None:
    @rl.function
    def program(s, n):
        s += rl.user("?") + rl.assistant(rl.gen("x", n=n))

    server.reply = lambda body: (200, {"choices": [{"message": {"content": "a"}}]})
    with pytest.raises(rl.ProgramError, match="gave 1 samples of 2"):
        program.run(2)
    end = threading.Event()
    server.reply = lambda body: (200, {"choices": []}) if end.wait(60) else (500, {})
    with pytest.raises(rl.ProgramError, match="within") as caught:
        program.run(1, timeout=0.05)
    end.set()
    assert isinstance(caught.value.__cause__, DeadlineExceeded)


def test_a_budget_counts_tokens_without_ids(server: Server, backend: rl.OpenAIBackend) -> None:
    @rl.function
    def program(s):
        for _ in range(3):
            s += rl.user("?") + rl.assistant(rl.gen("x", max_tokens=2))
            s.sync()

    with pytest.raises(rl.ProgramError, match="4 generated"):
        program.run(token_budget=4)
    assert len(server.asked) == 2


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ServerUnavailable, match="does not answer"):
        rl.OpenAIBackend("http://127.0.0.1:9/v1")
