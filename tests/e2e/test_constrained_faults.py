"""The engine is killed under constrained requests: clients see a pause, and the same text."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil

from rootlace.runtime.config import ConstraintConfig
from rootlace.wire.protocol import (
    Append,
    Chunk,
    Constraint,
    Generate,
    Generated,
    Open,
    SamplingParams,
    Text,
)
from tests.e2e.conftest import RawClient, engine_config
from tests.processes import alive
from tests.waiting import eventually

FORCED = json.dumps(
    {
        "type": "object",
        "properties": {
            "full_name_of_the_person": {"type": "string", "minLength": 20, "maxLength": 60},
            "country_of_residence": {"type": "string", "minLength": 20, "maxLength": 60},
        },
        "required": ["full_name_of_the_person", "country_of_residence"],
        "additionalProperties": False,
    }
)
CHECKED = json.dumps(
    {
        "type": "array",
        "items": {"type": "string", "minLength": 8, "maxLength": 30, "not": {"pattern": "^[abc]"}},
        "minItems": 4,
        "maxItems": 6,
        "uniqueItems": True,
    }
)
CONSTRAINTS = {
    "jumping": Constraint("json_schema", FORCED),
    "not jumping": Constraint("json_schema", FORCED, jump_forward="off"),
    "checked": Constraint("json_schema", CHECKED),
    "automaton": Constraint("regex", r"(Dear reader, [a-z ]{30,60}\. ){3}Yours\."),
    "free": None,
}


def ask(client: RawClient, branch: int, constraint: Constraint | None) -> int:
    op = client.op()
    params = SamplingParams(
        max_tokens=260,
        temperature=0.8,
        seed=branch % 100,
        n=2,
        logprobs=True,
        ignore_eos=constraint is None,
    )
    client.send(
        Open(client.op(), branch),
        Append(client.op(), branch, (Text("The day was"),)),
        Generate(op, branch, params=params, constraint=constraint, stream=True),
    )
    return op


def test_constrained_requests_go_on_where_the_engine_was_killed(start_server) -> None:
    server = start_server()
    client = RawClient(server.address)
    calm = {name: ask(client, 100 + i, c) for i, (name, c) in enumerate(CONSTRAINTS.items())}
    wanted = {name: client.wait(op) for name, op in calm.items()}
    disturbed = {name: ask(client, 200 + i, c) for i, (name, c) in enumerate(CONSTRAINTS.items())}
    watched = {disturbed["jumping"], disturbed["free"]}

    def all_have_begun() -> bool:
        return watched <= {e.op for e in client.receive() if isinstance(e, Chunk)} | {
            e.op for e in client.events if isinstance(e, Chunk)
        }

    eventually(all_have_begun)
    os.kill(server.engine().pid, signal.SIGKILL)
    for name, op in disturbed.items():
        before, after = wanted[name], client.wait(op)
        assert isinstance(before, Generated), (name, before)
        assert isinstance(after, Generated), (name, after)
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert other.token_ids == one.token_ids and other.text == one.text, name
            assert other.finish_reason == one.finish_reason, name
            assert other.forced_tokens == one.forced_tokens, name
            assert len(other.logprobs) == len(other.token_ids), name
            assert other.logprobs == one.logprobs, name
        assert after.usage.forced_tokens == before.usage.forced_tokens
        assert (after.usage.forced_tokens > 0) == (name in ("jumping", "checked", "automaton"))
        for index, output in enumerate(after.outputs):
            chunks = [
                e for e in client.events if isinstance(e, Chunk) and e.op == op and e.index == index
            ]
            assert "".join(chunk.text for chunk in chunks) == output.text, name
            ids = [token for chunk in chunks for token in chunk.token_ids]
            assert ids == list(output.token_ids), name
        if name in ("jumping", "not jumping", "checked"):
            for output in after.outputs:
                if output.finish_reason == "stop":
                    json.loads(output.text)
    client.close()


def test_an_engine_that_dies_or_stops_while_it_compiles(start_server, demo_model: Path) -> None:
    """Killed: the next engine compiles again. Stopped: no other request waits for the compilation.

    Long schemas are compiled first in a child process; a suspended one compiles for as long as the
    test wants.
    """
    patient = ConstraintConfig(compile_seconds=3600)
    server = start_server(replace(engine_config(demo_model), constraints=patient))
    client = RawClient(server.address)

    def ask_for(title: str) -> int:
        properties = {f"{title}_{i}": {"enum": [f"{i} {j}" for j in range(10)]} for i in range(400)}
        schema = {"type": "object", "properties": properties}
        return ask(client, client.op(), Constraint("json_schema", json.dumps(schema)))

    def suspend_compilers() -> list[psutil.Process]:
        """Suspend the compiler, or two on a slow machine, where long work is passed to another."""
        children: list[psutil.Process] = server.engine().children()
        for child in children:
            child.suspend()
        return children

    assert isinstance(client.wait(ask_for("first")), Generated)
    children = suspend_compilers()
    op = ask_for("killed")
    eventually(lambda: client.status().get("compiling") == 2)  # n is 2
    os.kill(server.engine().pid, signal.SIGKILL)
    for child in children:
        child.resume()
    eventually(lambda: not any(map(alive, children)))
    generated = client.wait(op)
    assert isinstance(generated, Generated), generated

    children = suspend_compilers()
    ask_for("stopped")
    eventually(lambda: client.status().get("compiling") == 2)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop() == 0
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # the engine may have killed it
            child.resume()
    eventually(lambda: not any(alive(process) for process in processes))
    client.close()
