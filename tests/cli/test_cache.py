"""`rootlace cache` and `top` against a server of canned answers, which keeps what it was asked."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rootlace.cli.app import app
from rootlace.cli.running import Sample, _rows
from rootlace.wire.errors import ServerUnavailable

LONG = "You are" + ", oh, so very" * 9
NODES = [
    {"id": 1, "parent": 0, "namespace": "", "start": 0, "end": 40, "head_text": LONG,
     "tail_text": "polite.", "uses": 7, "requests": [3], "idle_seconds": 2.4},
    {"id": 2, "parent": 1, "namespace": "", "start": 40, "end": 45, "head_text": "[bold] is it?",
     "uses": 1, "idle_seconds": 60.0, "programs": ["1:agent"]},
]  # fmt: skip
FOUND = "prompts differ " + "where they need not " * 5 + "at all"
PINS = [
    {"id": "p1", "namespace": "", "adapter": "", "tokens": 1200, "node": 4, "seconds_left": 9.6},
    {"id": "p2", "namespace": "s", "adapter": "x", "tokens": 7, "node": 9, "seconds_left": 3600.0},
]
ANSWERS: dict[str, Any] = {
    "/cache/explain": {"matched": 3, "limit": 9, "reason": "new", "says": "3 of 9 were cached."},
    "/cache/tree": {"nodes": NODES, "complete": False, "total": 3, "tokens": 50},
    "/cache/lint": {"findings": [{"says": FOUND, "tokens_lost": 12345}]},
    "/cache/pins": {"pins": PINS},
    "/tokenizer_info": {"eos_token": "</s>"},
}
METRICS = (
    "rootlace_time_to_first_token_seconds_sum {}\nrootlace_time_to_first_token_seconds_count {}\n"
)


class Canned(BaseHTTPRequestHandler):
    asked: list[tuple[str, Any]]

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.asked.append((self.path, body))
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != "Bearer key":
            status, answer = 401, json.dumps({"error": {"message": "the API key is missing"}})
        elif path == "/metrics":
            looks = sum(asked == "/metrics" for asked, _ in self.asked)
            status, answer = 200, METRICS.format(0.2 * looks, 4 * looks)
        elif path == "/get_server_info":
            looks = sum(asked == path for asked, _ in self.asked)
            values = {"prompt_tokens": 100 * looks, "cached_tokens": 75 * looks, "running": 3}
            values |= {"computed_tokens": 25 * looks}
            values |= {"output_tokens": 1000 * looks, "blocks_total": 8, "blocks_used": 2}
            answer = json.dumps({"served_model_name": "tiny[b]", "status": values})
            status = 200
        elif path == "/flush_cache":
            status, answer = 200, "Cache flushed.\n"
        else:
            status, answer = 200, json.dumps(ANSWERS[path])
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[HTTPServer]:
    Canned.asked = []
    with HTTPServer(("127.0.0.1", 0), Canned) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.05,))
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def run(server: HTTPServer, *arguments: str, key: str = "key") -> Result:
    url = f"http://127.0.0.1:{server.server_port}"
    return CliRunner().invoke(app, ["cache", *arguments, "--url", url, "--api-key", key])


def test_explain_text_and_saved_requests(server: HTTPServer, tmp_path: Path) -> None:
    text, request = tmp_path / "prompt.txt", tmp_path / "request.json"
    text.write_text("Once {upon} a time")
    messages = [{"role": "user", "content": "hi"}]
    request.write_text(json.dumps({"messages": messages, "model": "m", "max_tokens": 3}))
    result = run(server, "explain", str(text), "--cache-salt", "s")
    assert (result.exit_code, result.output) == (0, "3 of 9 were cached.\n")
    body = {"prompt": "Once {upon} a time", "cache_salt": "s"}
    assert Canned.asked[-2] == ("/cache/explain", body)
    result = run(server, "explain", str(request), "--json")
    assert json.loads(result.output) == ANSWERS["/cache/explain"]
    asked = {"messages": messages, "model": "m", "max_tokens": 3}
    assert Canned.asked[-1] == ("/cache/explain", asked)


def test_a_plain_text_for_a_chat_model_hints_at_its_template(
    server: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    template = {"chat_template": "{{ '<|im_start|>' + message.role }}"}

    def hint(given: str, reason: str = "new", answer: dict[str, str] = template) -> str:
        file.write_text(given)
        said = {"reason": reason, "says": "3 of 9 were cached."}
        monkeypatch.setitem(ANSWERS, "/cache/explain", said)
        monkeypatch.setitem(ANSWERS, "/tokenizer_info", answer)
        result = run(server, "explain", str(file))
        assert (result.exit_code, result.stdout) == (0, "3 of 9 were cached.\n")
        return result.stderr

    assert "chat template" in hint("Who are you?") and '"messages"' in hint("Who are you?")
    assert not hint("<|im_start|>user\nWho are you?")  # as the template writes it
    assert not hint("Who are you?", reason="whole")
    assert not hint("Who are you?", answer={})
    assert not hint(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))


def test_the_tree_is_drawn(server: HTTPServer) -> None:
    result = run(server, "tree", "--limit", "2")
    assert Canned.asked[-1][0] == "/cache/tree?namespace=&limit=2"
    first, second, third = result.output.splitlines()[:3]
    assert first == "3 nodes, 50 tokens; 2 shown"
    assert "oh, so very … polite." in second and "1 running" in second
    # What a prompt says is no markup.
    assert "5 [bold] is it?" in third and "1:agent" in third
    # Where it is no terminal, a node is a line however long it is.
    assert len(result.output.splitlines()) == 3 and second.endswith("1 running")
    assert len(third) - len(third.lstrip("│ └─")) > len(second) - len(second.lstrip("├└─ "))


def test_lint_and_flush(server: HTTPServer) -> None:
    assert run(server, "lint").output == f"    12,345 tokens  {FOUND}\n"
    assert run(server, "flush").exit_code == 0
    assert Canned.asked[-1] == ("/flush_cache", {})


def test_pins_are_listed(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run(server, "pins").output.splitlines()
    assert first == "     1,200 tokens  10 s left  p1"
    assert second == "         7 tokens  3,600 s left  p2  namespace 's'  adapter 'x'"
    assert Canned.asked[-1][0] == "/cache/pins?"
    assert json.loads(run(server, "pins", "--cache-salt", "s", "--json").output) == PINS
    assert Canned.asked[-1][0] == "/cache/pins?namespace=s"
    monkeypatch.setitem(ANSWERS, "/cache/pins", {"pins": []})
    assert run(server, "pins").output == "Nothing is pinned.\n"


def test_what_cannot_be_asked(server: HTTPServer, tmp_path: Path) -> None:
    result = run(server, "lint", key="other")
    assert result.exit_code == 1 and "the API key is missing" in result.output
    result = run(server, "explain", str(tmp_path / "none"))
    assert result.exit_code == 1 and "No such file" in result.output
    result = CliRunner().invoke(app, ["cache", "lint", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1 and "there is no server at" in result.output


def test_top_shows_rates(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0])
    # Of this module alone: threads of other tests look at the clock, too.
    fake = SimpleNamespace(
        monotonic=lambda: next(clock), sleep=lambda seconds: None, strftime=time.strftime
    )
    monkeypatch.setattr("rootlace.cli.running.time", fake)
    url = f"http://127.0.0.1:{server.server_port}"
    arguments = ["top", "--once", "--url", url, "--api-key", "key"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = {" ".join(line.split()) for line in result.output.splitlines()}
    assert f"tiny[b] at {url}" in rows
    assert "drafted 0.0% of these, 0.0% of drafts right" in rows
    assert {"generated 500.0 tokens/s", "prompts 50.0 tokens/s", "first token 50.0 ms"} <= rows
    assert {"hit rate 75.0% (since the start 75.0%)", "requests 3 running, 0 waiting"} <= rows
    assert "in the queue -" in rows and f"12,345 tokens {FOUND}" in rows
    assert any(row.startswith("blocks 25.0% in use") for row in rows)


def test_top_into_a_pipe_prints_frames_until_it_is_closed(server: HTTPServer) -> None:
    """As `rootlace top | head` reads it: each frame as soon as it is there."""
    url = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, "-m", "rootlace.cli", "top", "--url", url, "--api-key", "key"]
    with subprocess.Popen(
        [*command, "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        frames = 0
        for line in process.stdout:
            assert "\x1b" not in line
            frames += line.startswith("generated")
            if frames == 2:
                break
        process.stdout.close()
        assert process.wait(60) in (0, 1)
        assert not process.stderr.read()


def test_top_has_a_line_for_each_of_several_engines() -> None:
    own = {"up": True, "running": 1, "waiting": 2, "prompt_tokens": 8, "cached_tokens": 2}
    own |= {"blocks_used": 3, "blocks_total": 4}
    replicas = [{"replica": 0, **own}, {"replica": 1, "up": False}]
    sample = Sample(0.0, {}, {"replicas": replicas}, {}, [])
    rows = dict(_rows(sample, sample))
    assert rows["replica 0"] == "1 running, 2 waiting, 25.0% hits, 75.0% of its blocks in use"
    assert rows["replica 1"] == "is down"


def test_top_counts_no_engine_for_what_it_had_counted_before() -> None:
    """The first one goes on, the second one comes back, the third one is away, the fourth one was
    started anew."""

    def sample(when: float, *computed: int | None) -> Sample:
        own = dict.fromkeys(("running", "waiting", "cached_tokens", "blocks_used"), 0)
        own |= {"blocks_total": 4, "up": True}
        replicas = [
            {"replica": at, "up": False}
            if tokens is None
            else {"replica": at, **own, "computed_tokens": tokens, "prompt_tokens": tokens}
            for at, tokens in enumerate(computed)
        ]
        return Sample(when, {}, {"replicas": replicas}, {}, [])

    rows = dict(_rows(sample(0.0, 100, None, 5000, 70), sample(1.0, 110, 3000, None, 30)))
    assert rows["prompts"] == "40.0 tokens/s"


def test_top_waits_for_a_model_that_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([ServerUnavailable("the model b is not loaded"), KeyboardInterrupt()])

    def look(*_: str) -> None:
        raise next(looks)

    monkeypatch.setattr("rootlace.cli.running.ask", look)
    result = CliRunner().invoke(app, ["top", "--interval", "0.1"])
    assert result.exit_code == 0 and "the model b is not loaded" in result.output
    looks = iter([ServerUnavailable("the model b is not loaded")])
    result = CliRunner().invoke(app, ["top", "--once"])
    assert result.exit_code == 1 and "error: the model b is not loaded" in result.output
