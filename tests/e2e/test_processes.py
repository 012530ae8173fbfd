"""Processes start and end: nothing is lost, leaks or stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from rootlace.wire import protocol
from rootlace.wire.protocol import Append, Generate, Open, SamplingParams, Text
from tests.e2e.conftest import END_SECONDS, RawClient, Server, engine_config
from tests.processes import alive
from tests.waiting import eventually

ENDLESS = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)

STREAMING_CLIENT = """
import sys
from tests.e2e.conftest import RawClient
from tests.e2e.test_processes import ENDLESS
from rootlace.wire.protocol import Append, Generate, Open, Text
client = RawClient(sys.argv[1])
for branch in range(40):  # more than is done before we are killed
    op = 3 * branch + 1
    client.send(Open(op, branch), Append(op + 1, branch, (Text(f"{branch} times"),)),
                Generate(op + 2, branch, params=ENDLESS, stream=True))
while True:
    client.receive()
    print("chunk", flush=True)
"""


def generate(client: RawClient, branch: int, text: str, params: SamplingParams) -> int:
    op = client.op()
    client.send(
        Open(client.op(), branch),
        Append(client.op(), branch, (Text(text),)),
        Generate(op, branch, params=params, stream=True),
    )
    return op


def test_a_client_killed_in_mid_stream_frees_its_blocks(server: Server, client: RawClient) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STREAMING_CLIENT, server.address],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    for _ in range(3):  # the acknowledgements, then text
        assert process.stdout.readline()
    eventually(lambda: client.status()["running"] >= 1)
    process.kill()
    process.wait()
    eventually(lambda: client.status()["running"] == 0)
    status = client.status()
    assert status["blocks_free"] + status["blocks_evictable"] == 1024


def test_an_engine_killed_in_mid_stream_is_replaced_and_the_text_goes_on(start_server) -> None:
    server = start_server()
    client = RawClient(server.address)
    params = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    calm = generate(client, 1, "The day was", params)
    wanted = client.wait(calm)
    assert isinstance(wanted, protocol.Generated)
    disturbed = generate(client, 2, "The day was", params)
    eventually(lambda: any(e.op == disturbed for e in client.receive()))
    os.kill(server.engine().pid, signal.SIGKILL)
    got = client.wait(disturbed)
    assert isinstance(got, protocol.Generated), got
    assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert got.outputs[0].text == wanted.outputs[0].text
    chunks = [e for e in client.events if isinstance(e, protocol.Chunk) and e.op == disturbed]
    assert "".join(c.text for c in chunks) == got.outputs[0].text
    client.close()


def test_an_aborted_request_keeps_what_was_generated(server: Server, client: RawClient) -> None:
    def post(path: str, **body: Any) -> Any:
        return httpx.post(f"{server.url}{path}", json=body, timeout=END_SECONDS).json()

    sampling = {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True}
    before = client.status()["output_tokens"]
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(post, "/generate", text="Once", rid="r", sampling_params=sampling)
        eventually(lambda: client.status()["output_tokens"] - before > 9)
        post("/abort_request", rid="r")
        cut = asked.result()
    whole = post("/generate", text="Once", sampling_params=sampling)
    count = cut["meta_info"]["completion_tokens"]
    assert cut["meta_info"]["finish_reason"]["type"] == "abort" and count > 9
    assert cut["output_ids"] == whole["output_ids"][:count]
    assert cut["text"] and whole["text"].startswith(cut["text"])


def test_closing_the_lifeline_and_sigterm_end_everything_cleanly(start_server) -> None:
    for end in ("lifeline", "sigterm", "sigint"):
        # The client keeps its branch open: SIGTERM waits this long for it.
        server = start_server(drain_seconds=0.1)
        engine = server.engine()
        client = RawClient(server.address)
        generate(client, 1, "Once", ENDLESS)
        client.receive()
        if end == "lifeline":
            code = server.stop()
        else:
            server.process.send_signal(signal.SIGTERM if end == "sigterm" else signal.SIGINT)
            code = server.process.wait(END_SECONDS)
        assert code == 0, end
        assert not alive(engine), end
        client.close()


def test_a_model_that_cannot_be_loaded_is_named(start_server, tmp_path: Path) -> None:
    engine = engine_config(tmp_path / "nowhere")
    server = start_server(engine, model=str(tmp_path / "nowhere"))
    assert "nowhere" in server.ready["message"]
    assert server.process.wait(END_SECONDS) != 0
