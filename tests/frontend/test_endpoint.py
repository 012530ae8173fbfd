"""From a URL to the socket for programs, and the errors where there is none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

import rootlace as rl
from rootlace.wire.errors import ServerUnavailable, Unauthorized


@contextmanager
def answering(status: int, body: Any) -> Iterator[str]:
    """Return the URL of a server that always gives one answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def answer() -> Iterator[Callable[[int, Any], str]]:
    with ExitStack() as stack:
        yield lambda status, body: stack.enter_context(answering(status, body))


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (401, {}, Unauthorized, "answered 401"),
        (402, {}, ServerUnavailable, "/get_model_info answered 402"),
        (500, {}, ServerUnavailable, "answered 500"),
        (200, [], ServerUnavailable, "is not a Rootlace server"),
        (200, {}, ServerUnavailable, "no socket for programs"),
    ],
)
def test_an_answer_that_leads_nowhere(
    answer: Callable[[int, Any], str], status: int, body: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        rl.RuntimeEndpoint(answer(status, body))
    assert type(raised.value) is error
