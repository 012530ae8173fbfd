"""A program as a graph."""

from __future__ import annotations

import pytest

import rootlace as rl
from rootlace.trace import constant_prefix
from rootlace.wire.protocol import Text
from tests.frontend.fake_server import CHAT


@rl.function
def essay(s, topic, size=2):
    s += "An essay on " + topic + ".\n"
    forks = s.fork(size)
    forks += lambda i: f"Part {i}: " + rl.gen("part", max_tokens=9)
    forks.join()
    with s.var_scope("end"):
        s += "In all," + rl.gen("summary") + rl.select("mood", ["glad", "sad"])
    with s.copy() as c:
        c += s["summary"] + rl.gen("again")


def test_the_whole_program_without_running_it() -> None:
    trace = essay.trace()
    assert trace.prefix == "An essay on "
    assert trace.stopped == ""
    assert trace.variables == ["part", "summary", "mood", "end", "again"]
    assert str(trace) == (
        "essay\n"
        "├─ text 'An essay on '\n"
        "├─ value of topic\n"
        "├─ text '.\\n'\n"
        "├─ fork 2\n"
        "│  ├─ [0]\n"
        "│  │  ├─ text 'Part 0: '\n"
        "│  │  └─ gen part (max_tokens=9)\n"
        "│  └─ [1]\n"
        "│     ├─ text 'Part 1: '\n"
        "│     └─ gen part (max_tokens=9)\n"
        "├─ join gather_variable\n"
        "├─ text 'In all,'\n"
        "├─ gen summary\n"
        "├─ select mood (['glad', 'sad'], token_length_normalized)\n"
        "├─ fork 1\n"
        "│  └─ [0]\n"
        "│     ├─ value of summary\n"
        "│     └─ gen again\n"
        "└─ join gather_variable"
    )


def test_edges_follow_order_and_use() -> None:
    trace = essay.trace(topic="rain")
    assert trace.prefix == "An essay on rain.\n"
    nodes = {node.id: node for node in trace.nodes}
    summary = next(node.id for node in trace.nodes if node.name == "summary")
    use = next(node.id for node in trace.nodes if node.detail == "summary")
    assert (summary, use) in trace.edges
    fork = next(node for node in trace.nodes if node.kind == "fork")
    assert sorted(b for a, b in trace.edges if a == fork.id and nodes[b].kind == "text") == [
        branch.nodes[0].id for branch in fork.branches
    ]
    assert all(node.site.filename == __file__ for node in trace.nodes)


def test_what_forks_set_again_is_used_behind_their_join() -> None:
    @rl.function
    def program(s):
        s += rl.gen("x") + rl.gen("kept")
        with s.fork(2) as forks:
            forks += rl.gen("x")
        s += s["x"] + s["kept"]

    trace = program.trace()
    number = {(node.kind, node.detail): node.id for node in trace.nodes}
    joined = number["join", "gather_variable"]
    assert (joined, number["value", "x"]) in trace.edges
    kept = next(node.id for node in trace.nodes if node.name == "kept")
    assert (kept, number["value", "kept"]) in trace.edges


def test_token_ids() -> None:
    @rl.function
    def told(s, known, unknown):
        s += "A" + rl.ids(known) + rl.gen("x")
        s += rl.ids(unknown)

    trace = told.trace(known=[5, 6, 7])
    assert str(trace).splitlines()[1:4] == ["├─ text 'A'", "├─ 3 token ids", "└─ gen x"]
    assert trace.prefix == "A"
    assert "needs the value of unknown" in trace.stopped


def test_it_stops_where_a_value_is_needed() -> None:
    @rl.function
    def react(s, question):
        s += "Q: " + question + rl.select("action", ["search", "finish"])
        try:
            if s["action"] == "search":  # here
                s += rl.gen("query")
        except Exception:
            raise AssertionError("a program cannot catch the end of its trace") from None

    trace = react.trace(question="x")
    assert "needs the value of action" in trace.stopped and __file__ in trace.stopped
    assert [node.kind for node in trace.nodes] == ["text", "select"]
    assert "the rest is unknown" in str(trace)


@pytest.mark.parametrize(
    "use",
    [
        lambda v: int(v),
        lambda v: f"{v:.2f}",
        lambda v: v.strip(),
        lambda v: len(v),
        lambda v: [x for x in v],  # noqa: C416
        lambda v: bool(v),
        lambda v: {v: 1},
        lambda v: v * 2,
        lambda v: "a" in v,
        lambda v: v < 3,
    ],
)
def test_every_use_of_a_value_stops(use) -> None:
    program = rl.function(lambda s, x: s.append(str(use(x))))
    assert "needs the value of x" in program.trace().stopped


def test_a_program_called_by_a_program() -> None:
    @rl.function
    def outer(s, topic):
        s += "Look: "
        inner = essay(topic=topic)
        s += inner["summary"] + rl.gen("verdict")

    trace = outer.trace()
    assert trace.stopped == ""
    call = next(node for node in trace.nodes if node.kind == "call")
    assert "essay" in call.detail and len(call.branches[0].nodes) > 5
    assert "value of summary" in str(trace)


def test_async_programs() -> None:
    @rl.function
    async def program(s, x):
        s += "a" + x + rl.gen("y")
        s += "b" + await s["y"] + rl.gen("z")

    trace = program.trace()
    assert trace.variables == ["y", "z"] and trace.stopped == ""
    assert program.trace(x="1").prefix == "a1b" or program.trace(x="1").prefix == "a1"


def test_constant_prefix_with_a_chat_template() -> None:
    @rl.function
    def chat(s, question):
        s += rl.system("Be kind.")
        s += rl.user("Now: " + question)

    parts = constant_prefix(chat, CHAT)
    assert "".join(part.text for part in parts) == ("<s><|system|>Be kind.<|end|><|user|>Now: ")
    assert Text("Be kind.") in parts


def test_a_program_that_cannot_be_traced_has_a_shorter_prefix() -> None:
    @rl.function
    def breaks(s, x):
        s += "start"
        raise RuntimeError("not with symbols")

    assert [part.text for part in constant_prefix(breaks, CHAT)] == ["start"]
    assert "not with symbols" in breaks.trace().stopped


def test_a_wrong_value_is_told_at_the_programs_line() -> None:
    @rl.function
    def wrong(s):
        s += rl.gen("x", regex="a", whitespace="compat")

    line = wrong.trace().stopped
    assert line.startswith(f"{__file__}:") and "there are 'compact', 'flexible'" in line


def test_f_strings() -> None:
    @rl.function
    def formatted(s, x, y=3):
        s += f"Given {x} and {y}: " + rl.gen("z")
        s += f"So {s['z']} of {x}."

    trace = formatted.trace()
    assert trace.prefix == "Given " and trace.stopped == ""
    assert [node.detail for node in trace.nodes] == [
        "Given ", "x", " and 3: ", "", "So ", "z", " of ", "x", ".",
    ]  # fmt: skip
    assert [part.text for part in constant_prefix(formatted, CHAT, {"x": "8"})] == [
        "Given 8 and 3: "
    ]
