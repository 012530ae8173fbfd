"""`rootlace cache` against a server of canned answers, which keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rootlace.cli.app import app

NODES = [
    {"id": 1, "parent": 0, "namespace": "", "start": 0, "end": 40, "head_text": "You are",
     "tail_text": "polite.", "uses": 7, "requests": [3], "idle_seconds": 2.4},
    {"id": 2, "parent": 1, "namespace": "", "start": 40, "end": 45, "head_text": "[bold] is it?",
     "uses": 1, "idle_seconds": 60.0, "programs": ["1:agent"]},
]  # fmt: skip
ANSWERS: dict[str, Any] = {
    "/cache/explain": {"matched": 3, "limit": 9, "reason": "new", "says": "3 of 9 were cached."},
    "/cache/tree": {"nodes": NODES, "total": 3, "tokens": 50},
    "/cache/lint": {"findings": [{"says": "prompts differ", "tokens_lost": 12345}]},
}


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
    assert Canned.asked[-1] == ("/cache/explain", body)
    result = run(server, "explain", str(request), "--json")
    assert json.loads(result.output) == ANSWERS["/cache/explain"]
    assert Canned.asked[-1] == ("/cache/explain", {"messages": messages})


def test_the_tree_is_drawn(server: HTTPServer) -> None:
    result = run(server, "tree", "--limit", "2")
    assert Canned.asked[-1][0] == "/cache/tree?namespace=&limit=2"
    first, second, third = result.output.splitlines()[:3]
    assert first == "3 nodes, 50 tokens; 2 shown"
    assert "40 You are … polite." in second and "1 running" in second
    # What a prompt says is no markup.
    assert "5 [bold] is it?" in third and "1:agent" in third
    assert len(third) - len(third.lstrip("│ └─")) > len(second) - len(second.lstrip("├└─ "))


def test_lint_and_flush(server: HTTPServer) -> None:
    assert run(server, "lint").output == "    12,345 tokens  prompts differ\n"
    assert run(server, "flush").exit_code == 0
    assert Canned.asked[-1] == ("/flush_cache", {})


def test_what_cannot_be_asked(server: HTTPServer, tmp_path: Path) -> None:
    result = run(server, "lint", key="other")
    assert result.exit_code == 1 and "the API key is missing" in result.output
    result = run(server, "explain", str(tmp_path / "none"))
    assert result.exit_code == 1 and "No such file" in result.output
    result = CliRunner().invoke(app, ["cache", "lint", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1 and "there is no server at" in result.output
