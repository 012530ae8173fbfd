"""`rootlace bench` against a served model of bytes: what it asks, notes and writes."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from rootlace.cli import bench_load as loads
from rootlace.cli.app import app
from rootlace.cli.bench_load import Figures, Spread, Timed
from rootlace.runtime.server.http.app import make_runner
from rootlace.wire.protocol import Append, Generate, Text
from tests.server.http.fake_model import FakeModel, stand_in

SHAPE = loads.Shape(12, 100, 20, 400, 3, 0.5, seed=1)


@pytest.fixture(scope="module")
def model() -> Iterator[tuple[FakeModel, str]]:
    """Served from a thread, since the command has a loop of its own. A token is a byte."""
    found: list[tuple[FakeModel, str]] = []
    loop, ready = asyncio.new_event_loop(), Event()

    async def start() -> web.AppRunner:
        model = FakeModel()
        model.script = lambda prompt, index: "abcdefghij" * 10
        runner = make_runner(model)  # type: ignore[arg-type]
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append((model, f"http://127.0.0.1:{runner.addresses[0][1]}"))
        ready.set()
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = Thread(target=serve)
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        thread.start()
        ready.wait()
        yield found[0]
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def run(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--url", url, *arguments])


def asked(model: FakeModel) -> list[tuple[str, Generate]]:
    """Prompts and operations, without the probe."""
    found = []
    for session in model.sessions[1:]:
        texts = [
            "".join(part.text for part in op.parts if isinstance(part, Text))
            for op in session.ops
            if isinstance(op, Append)
        ]
        generates = [op for op in session.ops if isinstance(op, Generate)]
        found += list(zip(texts, generates, strict=True))
    return found


def test_a_load_its_table_and_its_files(model: tuple[FakeModel, str], tmp_path: Path) -> None:
    served, url = model
    served.sessions.clear()
    files = ["--json", str(tmp_path / "b.json"), "--html", str(tmp_path / "b.html")]
    shape = ["--load", "shared", "--requests", "12", "--groups", "3", "--prefix", "300"]
    result = run(url, *shape, "--input", "60", "--output", "8", "--concurrency", "4", *files)
    assert result.exit_code == 0, result.output
    for name in ("first token, ms", "between tokens, ms", "output tokens per second"):
        assert name in result.output
    requests = asked(served)
    assert len(requests) == 12
    # The lengths are those of the server's tokens, which are bytes here.
    assert all(0.8 * 361 < len(prompt) < 1.2 * 361 for prompt, _ in requests)
    assert set(Counter(prompt.partition("\n")[0] for prompt, _ in requests).values()) == {4}
    assert all(op.params.max_tokens == 8 and op.params.ignore_eos for _, op in requests)
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["errors"] == {} and len(written["requests"]) == 12
    told = written["asked"]
    assert datetime.fromisoformat(told.pop("date")).tzinfo is UTC and told.pop("rootlace")
    assert told == {
        "url": url,
        "model": "fake",
        "load": "shared",
        "requests": 12,
        "concurrency": 4,
        "input": 60,
        "output": 8,
        "seed": 0,
        "rate": 0.0,
        "prefix": 300,
        "groups": 3,
    }
    terms = "load shared, requests 12, concurrency 4, input 60, output 8, seed 0"
    assert terms in " ".join(result.output.split())
    assert terms in (tmp_path / "b.html").read_text()
    for one in written["requests"]:
        assert one["output_tokens"] == 8 and one["sent"] <= one["pieces"][0] <= one["ended"]
        assert one["cached_tokens"] == one["prompt_tokens"] // 2
    assert written["rates"]["cached prompt tokens, %"] == pytest.approx(50, abs=1)
    drawn = (tmp_path / "b.html").read_text()
    assert (
        drawn.count("<svg") == 2
        and drawn.count('class="bar"') == 12
        and "http" not in (drawn.replace(url, ""))
    )


def test_what_fails_is_counted_and_told(model: tuple[FakeModel, str], tmp_path: Path) -> None:
    served, url = model
    served.sessions.clear()
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 2000, "output_length": 3, "hash_ids": [1, 2, 3, 4]}
    trace.write_text(json.dumps(line) + "\n")
    served.fail = None
    result = run("http://127.0.0.1:9")
    assert result.exit_code == 1 and "there is no server" in result.output
    result = run(url, "--model", "other")
    assert result.exit_code == 1 and "the model 'other' does not exist" in result.output
    result = run(url, "--trace", str(trace), "--json", str(tmp_path / "b.json"))
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "b.json").read_text())["asked"]
    assert (told["load"], told["requests"], told["speed"]) == (str(trace), 1, 1.0)
    assert not {"input", "output", "rate"} & told.keys()  # which the trace says
    trace.write_text('{"timestamp": 0}\n')
    result = run(url, "--trace", str(trace))
    assert result.exit_code == 1 and "trace.jsonl:1:" in result.output
    assert "`input_length`" in result.output


def test_loads_are_the_same_for_the_same_seed() -> None:
    for name, load in loads.LOADS.items():
        again = load(SHAPE)
        assert again == load(SHAPE) and len(again) == 12, name
        assert len({ask.prompt for ask in again}) == 12, name
    lengths = [len(ask.prompt.split()) for ask in loads.LOADS["random"](SHAPE)]
    assert set(lengths) == {50}
    spread = sorted(len(ask.prompt.split()) for ask in loads.chat(SHAPE))
    assert spread[0] < 40 < 70 < spread[-1] <= 400


def test_arrivals_come_at_the_rate() -> None:
    asks = [loads.Ask("a", 1)] * 2000
    assert loads.arriving(asks, 0.0, 0) == asks
    timed = loads.arriving(asks, 50.0, 0)
    assert timed[0].at == 0.0 and 30 < timed[-1].at < 50


def test_a_trace_shares_what_its_blocks_share(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 5000, "input_length": 1200, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"timestamp": 2000, "input_length": 1300, "output_length": 0, "hash_ids": [1, 2, 4]},
        {"timestamp": 9000, "input_length": 5, "output_length": 7, "hash_ids": [9]},
    ]
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    asks = loads.of_trace(path, SHAPE, speed=2.0)
    assert [ask.at for ask in asks] == [0.0, 1.5, 3.5]
    assert [ask.max_tokens for ask in asks] == [1, 9, 7]
    first, second = asks[0].prompt.split(), asks[1].prompt.split()
    assert first[:512] == second[:512] and first[512:600] != second[512:600]
    assert (len(first), len(second)) == (650, 600)


def test_figures_of_known_times() -> None:
    timed = [
        Timed(None, at / 10, at / 10 + 1.0, [at / 10 + 0.1 + at / 1000, at / 10 + 1.0], 10, 5, 4)
        for at in range(10)
    ]
    timed.append(Timed(0.0, error="503: busy"))
    found = Figures.of(timed)
    assert found.errors == {"503: busy": 1}
    first = found.spreads["first token, ms"]
    assert first.p50 == pytest.approx(0.105) and first.most == pytest.approx(0.109)
    assert found.rates["requests"] == 10
    assert found.rates["output tokens per second"] == pytest.approx(40 / 1.9)
    assert found.rates["cached prompt tokens, %"] == 50
    # By a clock, what a request waited for room counts.
    late = Timed(1.0, 3.0, 5.0, [3.5, 5.0], 10, 0, 2)
    assert (late.first, late.whole, late.between) == (2.5, 4.0, 1.5)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 3.0)
    assert Figures.of([Timed(0.0, error="x")]).spreads == {}
