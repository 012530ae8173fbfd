"""Programs on conversation services: Anthropic's interface, LiteLLM, images, emulation.

The services are local; tests/clients has the tests with real clients.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rootlace as rl
from rootlace.testing import Scripted
from rootlace.wire.errors import (
    ConstraintNotMet,
    InvalidRequest,
    Overloaded,
    ServerUnavailable,
    Unauthorized,
)
from tests.frontend.fake_server import FakeServer

PNG = b"\x89PNG\r\n\x1a\nrest"


@dataclass
class Person:
    name: str


class Anthropic:
    """A service that answers with `reply(body)`: a text, or a status and a body."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: Any = {}
        self.reply: Callable[[dict[str, Any]], Any] = lambda body: "Hi."
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.asked.append(body)
                service.headers = self.headers
                assert self.path == "/v1/messages"
                said = service.reply(body)
                status, told = said if isinstance(said, tuple) else (200, message(said))
                self.send_response(status)
                self.end_headers()
                events = stream(told) if body["stream"] and status == 200 else [told]
                for event in events:
                    data = json.dumps(event)
                    line = f"event: {event['type']}\ndata: {data}\n\n" if body["stream"] else data
                    self.wfile.write(line.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


USAGE = {"input_tokens": 3, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2}


def message(text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": text}],
        "stop_reason": "max_tokens",
        "usage": {**USAGE, "output_tokens": 4},
    }


def stream(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": {"usage": {**USAGE, "output_tokens": 1}}}
    yield {"type": "ping"}
    for letter in whole["content"][1]["text"]:
        delta = {"type": "text_delta", "text": letter}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
    delta = {"stop_reason": whole["stop_reason"]}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 4}}
    yield {"type": "message_stop"}


@pytest.fixture
def service() -> Iterator[Anthropic]:
    found = Anthropic()
    yield found
    found.stop()


@pytest.fixture
def backend(service: Anthropic) -> Iterator[rl.AnthropicBackend]:
    made = rl.AnthropicBackend("m", "key", url=service.url)
    yield made
    made.close()


def lookup(word: str) -> str:
    return word


@rl.function
def chat(s, question):
    s += rl.system("Be brief.") + rl.user(question)
    s += rl.assistant(rl.gen("answer", max_tokens=9, stop="\n"))
    s += rl.user("And?") + rl.assistant("So: " + rl.gen("more", temperature=0))


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_interface(
    service: Anthropic, backend: rl.AnthropicBackend, streams: bool
) -> None:
    state = chat.run("Who?", backend=backend, stream=streams, top_p=0.5)
    if streams:
        assert "".join(state.text_iter("answer")) == "Hi."
    state.sync()
    assert (state["answer"], state.messages()[-1]["content"]) == ("Hi.", "So: Hi.")
    first, second = service.asked
    assert (first["model"], first["system"], first["max_tokens"]) == ("m", "Be brief.", 9)
    assert (first["stop_sequences"], first["top_p"], first["stream"]) == (["\n"], 0.5, streams)
    assert first["messages"] == [{"role": "user", "content": "Who?"}]
    assert [each["role"] for each in second["messages"]] == ["user", "assistant"] * 2
    assert second["messages"][-1]["content"] == "So: " and second["temperature"] == 0.0
    assert service.headers["x-api-key"] == "key" and service.headers["anthropic-version"]
    meta = state.get_meta_info("answer")
    # Here cached tokens are part of the prompt; Anthropic counts them apart.
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (10, 5, 4)
    assert meta["finish_reason"]["type"] == "length"
    spans = state.trace().spans
    assert [span.clock for span in spans] == ["client"] * 2
    assert all(span.first is not None and span.start <= span.first <= span.end for span in spans)


def test_values_and_samples(service: Anthropic, backend: rl.AnthropicBackend) -> None:
    @rl.function
    def program(s):
        s += rl.user("Who?") + rl.assistant(rl.gen("x", n=2, type=Person))

    names = iter("ab")
    service.reply = lambda body: json.dumps({"name": next(names)})
    state = program.run(backend=backend)
    assert state["x"] == [Person("a"), Person("b")] and len(service.asked) == 2
    form = service.asked[0]["output_config"]["format"]
    assert form["type"] == "json_schema" and form["schema"]["$defs"]["Person"]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ((401, {"type": "error", "error": {"message": "who?"}}), Unauthorized),
        ((529, {"type": "error", "error": {"message": "who?"}}), Overloaded),
        ((200, {"type": "message", "content": 3}), ServerUnavailable),
    ],
)
def test_errors_of_the_service(
    service: Anthropic, backend: rl.AnthropicBackend, said: Any, error: type
) -> None:
    service.reply = lambda body: said
    with pytest.raises(rl.ProgramError, match=r"who\?|something else") as caught:
        chat.run("Hello", backend=backend)
    assert isinstance(caught.value.__cause__, error)


class LiteLLM:
    """Stands for the package `litellm`."""

    class RateLimitError(Exception):
        pass

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Any = "Hi."
        self.ends = True

    def completion(self, **asked: Any) -> Any:
        self.asked.append(asked)
        if isinstance(self.answer, Exception):
            raise self.answer
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}

        def reply(kind: str, text: str, reason: str | None) -> Any:
            choice = {"index": 0, "finish_reason": reason, kind: {"content": text}}
            told = {"choices": [choice], "usage": usage}
            return SimpleNamespace(model_dump=lambda: told)

        if not asked["stream"]:
            return reply("message", self.answer, "stop")
        end = [reply("delta", "", "stop")] if self.ends else []
        return iter([*(reply("delta", letter, None) for letter in self.answer), *end])


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> LiteLLM:
    made = LiteLLM()
    monkeypatch.setitem(sys.modules, "litellm", made)
    return made


@rl.function
def ask(s):
    s += rl.user("Who?") + rl.assistant(rl.gen("x", seed=3, type=Person))


def test_litellm(litellm: LiteLLM) -> None:
    backend = rl.LiteLLMBackend("gemini/x", api_key="k")
    litellm.answer = '{"name": "Ida"}'
    for streams in (False, True):
        state = ask.run(backend=backend, stream=streams)
        assert "".join(state.text_iter("x")) == litellm.answer and state["x"] == Person("Ida")
        assert state.get_meta_info("x")["prompt_tokens"] == 7
    asked = litellm.asked[0]
    assert (asked["model"], asked["api_key"], asked["seed"]) == ("gemini/x", "k", 3)
    assert asked["messages"] == [{"role": "user", "content": "Who?"}]
    assert asked["response_format"]["json_schema"]["schema"]["$ref"]
    litellm.ends = False  # as with a lost connection
    with pytest.raises(rl.ProgramError, match="0 samples of 1"):
        _ = ask.run(backend=backend, stream=True)["x"]
    litellm.answer = LiteLLM.RateLimitError("slowly")
    with pytest.raises(rl.ProgramError, match="RateLimitError: slowly") as caught:
        ask.run(backend=backend)
    assert isinstance(caught.value.__cause__, Overloaded)
    with pytest.raises(rl.ProgramError, match="no way to go on"):
        litellm.answer = "Hi."
        chat.run("?", backend=backend)


@pytest.mark.parametrize(
    ("option", "said", "schema", "value"),
    [
        ({"type": int}, "\n 42", "integer", 42),
        ({"type": float}, "0.5", "number", 0.5),
        ({"type": bool}, "true", "boolean", True),
        ({"dtype": int}, "42", "integer", "42"),
        ({"dtype": "float"}, "0.5", "number", "0.5"),
        ({"dtype": str}, '"a"', "string", '"a"'),
    ],
)
def test_bare_types_are_asked_for_as_json(
    service: Anthropic,
    backend: rl.AnthropicBackend,
    option: dict[str, Any],
    said: str,
    schema: str,
    value: Any,
) -> None:
    service.reply = lambda body: said
    program = rl.function(
        lambda s: s.append(rl.user("?") + rl.assistant(rl.gen("x", stop=";", **option)))
    )
    assert program.run(backend=backend)["x"] == value
    (asked,) = service.asked
    assert asked["output_config"]["format"]["schema"] == {"type": schema}
    assert asked["stop_sequences"] == [";"]  # white space may precede the number


@pytest.mark.parametrize("off", [-1, 0])
def test_top_k_is_turned_off_by_saying_nothing(
    service: Anthropic, backend: rl.AnthropicBackend, litellm: LiteLLM, off: int
) -> None:
    @rl.function
    def program(s):
        s += rl.user("Hi") + rl.assistant(rl.gen("x", top_k=off, temperature=1.0))

    litellm.answer = "Hi."
    program.run(backend=backend)
    program.run(backend=rl.LiteLLMBackend("gemini/x"))
    for asked in (service.asked[0], litellm.asked[0]):
        assert asked["temperature"] == 1.0 and "top_k" not in asked


def test_litellm_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(InvalidRequest, match="rootlace\\[litellm\\]"):
        rl.LiteLLMBackend("x")


@pytest.mark.parametrize(
    ("appended", "reason"),
    [
        (rl.user("?") + rl.assistant(rl.select("x", ["a"])), "emulate"),
        (rl.user("?") + rl.assistant(rl.gen("x", regex="a")), r"emulate=\[\"regex"),
        (rl.user("?") + rl.assistant(rl.gen("x", ebnf="start: A")), "of the kind ebnf"),
        (rl.user("?") + rl.assistant(rl.gen("x", tools=rl.tools(lookup))), "tools= is none"),
        (rl.user("?") + rl.assistant(rl.gen("x", logprobs=True)), "log-probabilities cannot"),
        (rl.user("?") + rl.assistant(rl.gen("x", seed=1)), "seed cannot be asked for"),
        ("Once" + rl.gen("x"), "text without messages"),
        (rl.image(PNG) + rl.user("?") + rl.assistant(rl.gen("x")), "stands in a message"),
    ],
)
def test_what_cannot_be_asked_fails_at_its_line(
    service: Anthropic, backend: rl.AnthropicBackend, appended: Any, reason: str
) -> None:
    @rl.function
    def program(s):
        s += appended

    with pytest.raises(rl.ProgramError, match=reason) as caught:
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, InvalidRequest)
    assert caught.value.filename == __file__ and not service.asked


def test_what_is_emulated(service: Anthropic) -> None:
    @rl.function
    def program(s):
        s += rl.user("Is it?") + rl.assistant(rl.select("x", ["Yes", "No", "NO", " no"]))
        s += rl.user("Since?") + rl.assistant(rl.gen("year", regex="[0-9]{4}", n=2))
        return s["x"], s["year"]

    backend = rl.AnthropicBackend("m", url=service.url, emulate=["select", "regex"])
    replies = iter(["Perhaps.", "**no**", "In 1999", "1999", "2000"])
    service.reply = lambda body: next(replies)
    state = program.run(backend=backend)
    assert state.ret_value == ("No", ["1999", "2000"])
    # The question is sent with a hint, which the conversation does not keep.
    assert service.asked[0]["messages"][-1]["content"].endswith("nothing else:\nYes\nNo\nNO\n no")
    assert "[0-9]{4}" in service.asked[-1]["messages"][-1]["content"]
    assert [each["content"] for each in state.messages()] == ["Is it?", "No", "Since?", "1999"]
    assert state.get_meta_info("x")["prompt_tokens"] == 20  # both attempts count
    wrong = rl.function(lambda s: s.append(rl.user("?") + rl.assistant(rl.gen(regex="("))))
    with pytest.raises(rl.ProgramError, match="regex: missing") as caught:
        wrong.run(backend=backend)
    assert caught.value.code == "invalid_constraint"
    replies = iter(["NO", "1999", "2000"])
    assert program.run(backend=backend)["x"] == "NO"  # an exact choice precedes similar ones
    service.reply = lambda body: "Perhaps."
    with pytest.raises(rl.ProgramError, match="is none of") as caught:
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, ConstraintNotMet)
    service.reply = lambda body: "\n42 years\nor so"  # white space ends a number, begins none
    count = rl.function(lambda s: s.append(rl.user("?") + rl.assistant(rl.gen("x", type=int))))
    assert count.run(backend=backend)["x"] == 42
    with pytest.raises(InvalidRequest, match="emulate="):
        rl.AnthropicBackend("m", emulate=["tools"])


# ---------------------------------------------------------------- images


def look(source: Any) -> Any:
    @rl.function
    def program(s):
        s += rl.user("What is this? " + rl.image(source))
        s += rl.assistant(rl.gen("x"))

    return program


def test_images_pass(service: Anthropic, backend: rl.AnthropicBackend, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(PNG)
    data = "data:image/png;base64,iVBORw0KGgpyZXN0"
    inline = {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}
    address = "https://example.org/a.png"
    for source, expected in (
        (PNG, inline),
        (path, inline),
        (str(path), inline),
        (data, inline),
        (address, {"type": "url", "url": address}),
    ):
        state = look(source).run(backend=backend)
        assert service.asked[-1]["messages"][-1]["content"] == [
            {"type": "text", "text": "What is this? "},
            {"type": "image", "source": expected},
        ]
        again = rl.State.from_json(state.to_json())
        chat.run("?", after=again, backend=backend)
        assert service.asked[-1]["messages"][0]["content"][1]["source"] == expected


def test_images_in_openais_form(litellm: LiteLLM) -> None:
    @rl.function
    def program(s, address):
        picture = {"type": "image_url", "image_url": {"url": address}}
        s += [{"role": "user", "content": [{"type": "text", "text": "?"}, picture]}]
        s += rl.assistant(rl.gen("x"))

    data = "data:image/png;base64,iVBORw0KGgpyZXN0"
    program.run(data, backend=rl.LiteLLMBackend("m"))
    assert litellm.asked[0]["messages"][0]["content"] == [
        {"type": "text", "text": "?"},
        {"type": "image_url", "image_url": {"url": data}},
    ]
    assert str(program.trace(data)).count("image image/png") == 1


def test_a_backend_for_tests_tells_images_apart() -> None:
    backend = Scripted(x="a cat")
    other = PNG + b"!"
    for source in (PNG, other, PNG):
        assert look(source).run(backend=backend)["x"] == "a cat"
    prompts = [call.prompt for call in backend.calls]
    assert prompts[0] == prompts[2] != prompts[1] and "[image " in prompts[0]


def test_models_that_read_text_only_refuse_images_at_the_line(tmp_path: Path) -> None:
    server = FakeServer(tmp_path)
    endpoint = rl.RuntimeEndpoint(server.address)
    with pytest.raises(rl.ProgramError, match="fake reads text only; OpenAIBackend") as caught:
        look(PNG).run(backend=endpoint)
    assert (caught.value.filename, caught.value.what) == (__file__, "image()")
    endpoint.close()
    server.stop()


def test_what_is_no_image() -> None:
    for wrong, reason in ((b"GIF", "PNG, JPEG"), ("/no/such.png", "No such"), ("data:,", "PNG")):
        with pytest.raises(InvalidRequest, match=reason):
            rl.image(wrong)
