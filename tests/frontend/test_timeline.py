"""The operations of a run and their times."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rootlace as rl
from rootlace.client.channel import Ask, BranchText
from rootlace.testing import Scripted
from rootlace.timeline import Span
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest
from tests.frontend.fake_server import FakeServer
from tests.waiting import eventually

TIMING = protocol.Timing(0.25, 1.0, 3.0, ((1.0, 1), (2.0, 5), (3.0, 6)))


class Measuring(FakeServer):
    """Reports three seconds and forced tokens 1 to 3 for each generation."""

    def _answer(self, branch: BranchText, op: Ask) -> list[protocol.Event] | None:
        events = super()._answer(branch, op)
        if not events or not isinstance(events[-1], protocol.Generated):
            return events
        last = events[-1]
        outputs = tuple(
            msgspec.structs.replace(
                output, forced_tokens=3, forced_at=(1, 2, 3), drafted_at=((5, 1),)
            )
            for output in last.outputs
        )
        usage = msgspec.structs.replace(last.usage, cached_tokens=2, forced_tokens=3)
        told = msgspec.structs.replace(last, outputs=outputs, usage=usage, timing=TIMING)
        return [*events[:-1], told]


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[rl.RuntimeEndpoint]:
    fake = Measuring(tmp_path, script=lambda text, op: "abcdef")
    endpoint = rl.RuntimeEndpoint(fake.address)
    yield endpoint
    endpoint.close()
    fake.stop()


@rl.function
def tips(s, topic):
    s += f"Tips on {topic}:"
    with s.fork(2) as forks:
        forks += lambda i: f" {i}." + rl.gen("tip")
    s += " In all" + rl.select("mood", ["good", "bad"])


def spans(state: rl.ProgramState) -> dict[str, Span]:
    return {f"{span.kind} {span.name}": span for span in state.trace().spans}


def test_times_are_the_servers(measured: rl.RuntimeEndpoint) -> None:
    @rl.function
    def one(s):
        s += "xyz" + rl.gen("a")

    (span,) = one.run(backend=measured).trace().spans
    assert (span.clock, span.name, span.before, span.text) == ("server", "a", "xyz", "abcdef")
    assert span.line.endswith(" in one") and Path(__file__).name in span.line
    assert span.prompt_tokens == 3 and span.cached_tokens == 2 and span.completion_tokens == 6
    start, end = span.start, span.end
    # The run began less than three seconds ago, and no operation can have begun before.
    assert start == 0.0 and span.asked >= 0.0 and end < 3.0
    assert span.first == pytest.approx(start + 1.0)
    assert span.admitted == pytest.approx(start + 0.25)
    # One token at once, four in the second second (three of these forced), one more in the third,
    # and one drafted token.
    assert [(stretch.tokens, stretch.kind) for stretch in span.stretches] == [
        (1, "sampled"),
        (3, "forced"),
        (1, "sampled"),
        (1, "tree"),
    ]
    times = [time - start for stretch in span.stretches for time in (stretch.start, stretch.end)]
    assert times == pytest.approx([1.0, 1.0, 1.0, 1.75, 1.75, 2.0, 2.0, 3.0])


def test_lanes_are_branches_in_the_order_of_the_tree() -> None:
    backend = Scripted(tip=["eat", "sleep well"], mood="good")
    timeline = tips.run("health", backend=backend).trace()
    assert [(lane.name, lane.parent) for lane in timeline.lanes] == [
        ("main", None),
        ("0", 0),
        ("1", 0),
    ]
    main, first, second = timeline.lanes
    assert [span.text for span in first.spans + second.spans] == ["eat", "sleep well"]
    assert first.spans[0].before == " 0." and main.spans[0].before == "Tips on health: In all"
    chosen = main.spans[0]
    assert (chosen.kind, chosen.text, chosen.choices) == ("select", "good", ("good", "bad"))
    assert len(chosen.scores) == 2 and chosen.first is None
    assert timeline.program == "tips" and timeline.model == "scripted"
    assert timeline.total("completion_tokens") == 3
    # Operations without times are measured here; none ends before its start, or after the run.
    for span in timeline.spans:
        assert span.clock == "client"
        assert 0 <= span.asked <= span.start <= span.end <= timeline.seconds
    text = str(timeline)
    assert text.startswith("tips: ") and "gen tip" in text and "\n  1\n" in text


def test_marks_have_no_lane_and_tools_have_bars() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    tools = rl.tools(add)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

    @rl.function
    def agent(s):
        for attempt in s.retry(2, on=ValueError):
            with attempt:
                s += rl.user("2 + 3?") + rl.assistant(rl.gen("said", tools=tools))
                if not s.call_tools():
                    raise ValueError
        s += rl.assistant(rl.gen("end"))

    timeline = agent.run(backend=Scripted(said=["?", call], end="5")).trace()
    assert [(lane.name, lane.parent, len(lane.spans)) for lane in timeline.lanes] == [
        ("main", None, 1),
        ("0", 0, 3),
    ]
    gen, tool, last = timeline.lanes[1].spans
    assert (tool.kind, tool.name, tool.before, tool.text) == ("tool", "add", "a=2, b=3", "5")
    assert gen.end <= tool.start <= tool.end <= last.start
    assert last.before.endswith("<|tool|>5<|end|><|assistant|>")


async def test_async_programs_and_tools() -> None:
    async def half(a: int) -> float:
        raise ValueError("odd")

    tools = rl.tools(half)
    call = '<tool_call>\n{"name": "half", "arguments": {"a": 3}}\n</tool_call>'

    @rl.function
    async def agent(s):
        s += rl.user("?") + rl.assistant(rl.gen("said", tools=tools))
        await s.call_tools()

    found = spans(await agent.run_async(backend=Scripted(said=call)))
    assert found["tool half"].state == "failed" and "odd" in found["tool half"].text


def test_what_failed_and_what_was_cancelled(server: FakeServer, backend: Any) -> None:
    def script(text: str, op: protocol.Generate) -> str:
        if op.name == "bad":
            raise InvalidRequest("no such thing")
        return "x"

    server.script = script

    @rl.function
    def program(s):
        s += "a" + rl.gen("good") + rl.gen("bad") + rl.gen("never")

    state = program.run(stream=True)
    state.sync()
    timeline = state.trace()
    assert [span.state for span in timeline.lanes[0].spans] == ["done", "failed", "cancelled"]
    assert timeline.lanes[0].spans[1].error == "no such thing"
    assert "no such thing" in timeline.error


def test_what_still_runs(server: FakeServer, backend: Any) -> None:
    seen = []

    @rl.function
    def program(s):
        s += "a" + rl.gen("x")
        seen.append(s.trace())

    server.hold()
    state = program.run(stream=True)
    eventually(lambda: bool(seen))
    server.release()
    state.sync()
    assert [span.state for span in seen[0].spans] == ["running"]
    assert [span.state for span in state.trace().spans] == ["done"]


def test_the_page_holds_the_data_and_nothing_of_others(tmp_path: Path) -> None:
    backend = Scripted(tip="</script><b>&amp;", mood="bad")
    timeline = tips.run("é </script>", backend=backend).trace()
    timeline.save(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert msgspec.convert(json.loads(data[1]), rl.Timeline) == timeline
    assert page.count("</script>") == 2
    assert not re.findall(r"https?://|src=|@import|url\(", page.replace(data[0], ""))


def test_long_texts_and_long_runs_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootlace.program.operations.MOST", 3)

    @rl.function
    def program(s):
        s += "b" * 9000 + rl.gen("x")
        s += "c" + rl.gen("y")

    timeline = program.run(backend=Scripted(default="z")).trace()
    assert timeline.forgotten == 1
    assert [span.name for span in timeline.spans] == ["x", "y"]
    text = "half \ud800"
    half = rl.function(lambda s: s.append(text + rl.gen("x")))
    state = half.run(backend=Scripted(default="z"), stream=True)
    state.sync()
    assert "half ?" in state.trace().to_json()
    whole = program.run(backend=Scripted(default="d" * 9000)).trace().spans[0].text
    assert len(whole) < 4100 and whole.startswith("d") and "5000 characters" in whole


def test_names_of_deep_branches_are_cut() -> None:
    @rl.function
    def program(s):
        for _ in range(30):
            (s,) = s.fork(1)
            s += rl.gen("x")
        s.sync()

    lanes = program.run(backend=Scripted(default="a")).trace().lanes
    assert [lane.name for lane in lanes[:3]] == ["main", "0", "0.0"]
    assert lanes[-1].name.startswith("…") and max(len(lane.name) for lane in lanes) == 40


def test_a_saved_state_has_no_times() -> None:
    state = tips.run("x", backend=Scripted(default="good", check=False))
    with pytest.raises(InvalidRequest, match="when it did what"):
        rl.State.from_json(state.to_json()).trace()


def test_a_graph_as_a_page(tmp_path: Path) -> None:
    tips.trace().save(tmp_path / "graph.html")
    page = (tmp_path / "graph.html").read_text()
    assert page.count('class="branch inner"') == 2 and "gen tip" in page
    assert "value of topic" in page and "<script" not in page
