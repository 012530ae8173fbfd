"""Marks, attempts, and choosing among continuations."""

from __future__ import annotations

import asyncio
import itertools

import pytest

import rootlace as rl
from rootlace.testing import Scripted
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidConstraint, InvalidRequest
from tests.frontend.fake_server import FakeServer
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("backend")


def in_turn(server: FakeServer, *texts: str | Exception) -> None:
    turns = itertools.cycle(texts)

    def script(text: str, op: protocol.Generate) -> str:
        said = next(turns)
        if isinstance(said, Exception):
            raise said
        return said

    server.script = script


def test_a_state_goes_back_to_a_mark(server: FakeServer) -> None:
    in_turn(server, "one", "two", "three")

    @rl.function
    def program(s):
        s += rl.system("Begin.") + "x"
        s["kept"] = 1
        mark = s.mark()
        said = []
        for _ in range(3):
            s += rl.user("?") + rl.assistant(rl.gen("answer"))
            said.append(s["answer"])
            assert len(s.messages()) == 3 and s["kept"] == 1
            s.rollback(mark)
            assert "answer" not in s and len(s.messages()) == 1
        s += " end"
        return said

    state = program.run()
    assert state.ret_value == ["one", "two", "three"]
    assert state.text() == "<s><|system|>Begin.<|end|>x end"
    prompts = {op.branch: op for op in server.sent(protocol.Generate)}
    assert len(prompts) == 3
    eventually(lambda: server.open_branches == 0)


def test_a_rollback_forgets_what_was_refused_before_it_was_sent(server: FakeServer) -> None:
    @rl.function
    def program(s):
        mark = s.mark()
        with pytest.raises(rl.ProgramError):
            s += "lost" + rl.assistant_end()  # no message is open
        s.rollback(mark)
        s += "kept"

    assert program.run().text() == "kept"
    sent = [part.text for op in server.sent(protocol.Append) for part in op.parts]
    assert sent == ["kept"]


def test_inside_a_program_that_is_called(server: FakeServer) -> None:
    in_turn(server, "one", "two")

    @rl.function
    def inner(s):
        mark = s.mark()
        s += rl.gen("a")
        first = s["a"]
        s.rollback(mark)
        s += rl.gen("b")
        return first

    @rl.function
    def outer(s):
        s += "x "
        found = inner(s)
        s += "!"
        assert found["b"] == "two" and "a" not in found
        return found.ret_value

    state = outer.run()
    assert (state.text(), state.ret_value) == ("x two!", "one")


def test_attempts_begin_at_the_same_place(server: FakeServer) -> None:
    in_turn(server, "seven", InvalidConstraint("no"), "8", "9")
    tried = []

    @rl.function
    def program(s):
        s += "A number: "
        for attempt in s.retry(4):
            with attempt:
                s += rl.gen("n")
                tried.append(s["n"])
                s["n"] = int(s["n"])
        return s["n"]

    state = program.run()
    assert (state.text(), state.ret_value, tried) == ("A number: 8", 8, ["seven", "8"])
    in_turn(server, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        program.run()
    assert tried[2:] == ["x"] * 4


def test_choices_and_attempts_draw_apart_with_one_seed(server: FakeServer) -> None:
    in_turn(server, "x", "y", "z")

    @rl.function
    def program(s):
        s += rl.gen("first")
        rl.majority(s, 3, rl.gen("vote"), "vote", key=len)
        rl.beam(s, rl.gen("step", seed=2**63 - 1), key=len_of_text, depth=2, width=2, branches=2)
        for attempt in s.retry(2):
            with attempt:
                rl.best_of(s, 2, rl.gen("tried"), key=len_of_text)
                if sum(op.name == "tried" for op in server.sent(protocol.Generate)) < 4:
                    raise ValueError
        s += rl.gen("last")

    def len_of_text(fork):
        return len(fork.text())

    program.run(seed=7)
    seeds: dict[str, list[int | None]] = {}
    for op in server.sent(protocol.Generate):
        seeds.setdefault(op.name, []).append(op.params.seed)
    assert seeds["first"] == seeds["last"] == [7]
    assert sorted(seeds["vote"]) == [7, 8, 9]
    wrapped = range(-(2**63), -(2**63) + 3)  # seeds are 64 bits
    assert sorted(seeds["step"][:2]) == [wrapped[0], 2**63 - 1]
    assert sorted(seeds["step"][2:]) == [*wrapped, 2**63 - 1]
    assert sorted(seeds["tried"][:2]) == [7, 8] and sorted(seeds["tried"][2:]) == [9, 10]

    before = len(server.sent(protocol.Generate))

    @rl.function
    def samples(s):
        rl.best_of(s, 3, rl.gen("both", n=2), key=len_of_text)
        for _ in s.retry(3):
            if s.branch.seed_offset:
                break
        s += rl.gen("last")

    samples.run(seed=7)
    seen = [op.params.seed for op in server.sent(protocol.Generate)[before:]]
    assert sorted(seen[:3]) == [7, 9, 11] and seen[3:] == [7]

    in_turn(server, "x")
    unseeded = len(server.sent(protocol.Generate))

    @rl.function
    def without(s):
        rl.majority(s, 2, rl.gen("vote"), "vote")

    without.run()
    assert {op.params.seed for op in server.sent(protocol.Generate)[unseeded:]} == {None}


def test_forks_of_a_failed_attempt_are_forgotten(server: FakeServer) -> None:
    @rl.function
    def program(s, before):
        s += "A"
        kept = s.fork(2)
        if before:
            kept += rl.gen("early")
        for attempt in s.retry(3):
            with attempt:
                forks = s.fork(2)
                forks += rl.gen("n")
                s += forks[0]["n"]
        return s.text(), kept

    no = InvalidConstraint("no")
    in_turn(server, no, no, no, no, "8", "9")
    assert program.run(False).ret_value[0] == "A8"
    # Failures outside attempts still end the run.
    in_turn(server, no, no, no, no, "8", "9")
    with pytest.raises(rl.ProgramError, match="early"):
        program.run(True)


async def test_attempts_in_an_async_program(server: FakeServer) -> None:
    in_turn(server, "x", "8")

    @rl.function
    async def program(s):
        for attempt in s.retry(2, on=ValueError):
            with attempt:
                s += rl.gen("n")
                int(await s["n"])

    assert (await program.run_async()).text() == "8"

    @rl.function
    async def other(s):
        for attempt in s.retry(2, on=ValueError):
            with attempt:
                raise KeyError("k")

    with pytest.raises(KeyError, match="k"):
        await other.run_async()


def test_wrong_uses() -> None:
    @rl.function
    def program(s, use):
        s += "x"
        use(s)

    for use, error in (
        (lambda s: s.rollback(s), "what mark"),
        (lambda s: list(s.retry(0)), "at least 1 attempt"),
        (lambda s: rl.best_of(s, 2, "text"), "without a key"),
        (lambda s: rl.best_of(s, 2, rl.gen()), "that has a name"),
        (lambda s: rl.best_of(s, 0, rl.gen("x")), r"best_of\(\) .* at least 1"),
        (lambda s: rl.majority(s, 0, rl.gen("x"), "x"), r"majority\(\) .* at least 1"),
        (lambda s: rl.beam(s, "x", key=str, depth=1, branches=0), r"beam\(\) .* at least 1"),
        (lambda s: rl.gen("x", choices=["a", "b"], n=2), "choices take no n=2"),
        (lambda s: rl.beam(s, "x", key=str, depth=0), "at least 1"),
    ):
        with pytest.raises((TypeError, InvalidRequest), match=error):
            program.run(use)
    streamed = program.run(lambda s: s.mark(), stream=True)
    with pytest.raises(InvalidRequest, match="streamed cannot be taken back"):
        list(streamed.text_iter())


def test_the_best_goes_on(server: FakeServer) -> None:
    in_turn(server, "bb", InvalidConstraint("no"), "cccc", "ddd")

    @rl.function
    def program(s):
        s += "Write: "
        score = rl.best_of(s, 4, rl.gen("text"), key=lambda fork: len(fork["text"]))
        s += "!"
        return score, s["text"]

    state = program.run()
    assert state.text() == "Write: cccc!" and state.ret_value == (4, "cccc")
    in_turn(server, InvalidConstraint("no"))
    with pytest.raises(rl.ProgramError, match="no"):
        program.run()
    eventually(lambda: server.open_branches == 0)


async def test_the_likeliest_goes_on(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn(server, "a", "b", "c")
    made = protocol.TokenLogprob
    likely = {"a": -3.0, "b": -0.5, "c": -2.0}

    def logprob(token: int, text: str, _: float) -> protocol.TokenLogprob:
        return made(token, text, likely[text])

    monkeypatch.setattr(protocol, "TokenLogprob", logprob)

    @rl.function
    async def program(s):
        s += "Write: "
        return await rl.best_of(s, 3, rl.gen("text"))

    state = await program.run_async()
    assert (state.text(), state.ret_value) == ("Write: b", -0.5)


def test_the_majority_wins_and_the_others_are_cancelled(server: FakeServer) -> None:
    in_turn(server, "4", "5", " 4", InvalidConstraint("no"), "4")

    @rl.function
    def program(s):
        s += "2 + 2 = "
        return rl.majority(s, 5, rl.gen("n"), "n", key=str.strip)

    state = program.run()
    assert (state.ret_value, state.text()) == ("4", "2 + 2 = 4")

    # Three of five agree while two still run.
    release = []

    def script(text: str, op: protocol.Generate) -> str:
        release.append(op)
        if len(release) == 4:
            server.hold()
        return "4"

    server.script = script
    state = program.run()
    assert state.ret_value == "4"
    eventually(lambda: len(server.sent(protocol.Cancel)) >= 1)
    server.release()
    eventually(lambda: server.open_branches == 0)


def test_seeds_and_handling_of_choices(server: FakeServer) -> None:
    @rl.function
    def program(s):
        s += "x" + rl.gen("a", choices=["b", "c"], temperature=2, seed=5, priority=3)
        rl.best_of(s, 2, rl.select("d", ["e", "f"], temperature=2), key=lambda fork: 0)
        s += rl.select("g", ["h", "i"])

    program.run(seed=9)
    sent = server.sent(protocol.Select)
    assert [op.seed for op in sent] == [5, 9, 10, None]  # without a temperature nothing is drawn
    assert [op.handling.priority for op in sent] == [3, 0, 0, 0]


def test_a_majority_of_values_without_a_hash(server: FakeServer) -> None:
    in_turn(server, "[1]", "[1,2]", "[ 1, 2]")

    @rl.function
    def program(s):
        s += "x"
        return rl.majority(s, 3, rl.gen("n", type=list[int]), "n")

    assert program.run().ret_value == [1, 2]


async def test_majority_in_an_async_program(server: FakeServer) -> None:
    in_turn(server, "x", "y", "y")

    @rl.function
    async def program(s):
        s += "?"
        return await rl.majority(s, 3, lambda fork: fork.append(rl.gen("n")), "n")

    states = await asyncio.gather(*[program.run_async() for _ in range(3)])
    assert [state.ret_value for state in states] == ["y"] * 3


async def test_a_beam_keeps_the_best_of_each_step(server: FakeServer) -> None:
    counter = itertools.count()
    server.script = lambda text, op: str(next(counter) % 4)

    async def value(fork):
        return int("0" + (await fork.text()).replace("|", ""))

    @rl.function
    async def asynchronous(s):
        s += "|"
        return await rl.beam(s, rl.gen("digit"), key=value, depth=3, width=2, branches=2)

    @rl.function
    def ordinary(s):
        s += "|"
        key = lambda fork: int(fork.text().replace("|", ""))  # noqa: E731
        return rl.beam(s, rl.gen("digit"), key=key, depth=3, width=2, branches=2)

    # Step by step: 0 1; of 1 12 13, of 0 00 01; of 13 132 133, of 12 120 121.
    state = ordinary.run()
    assert (state.text(), state.ret_value) == ("|133", 133)
    counter = itertools.count()
    assert (await asynchronous.run_async()).text() == "|133"
    eventually(lambda: server.open_branches == 0)


async def test_a_stream_has_what_was_chosen(server: FakeServer) -> None:
    step = rl.gen("x", logprobs=True)

    def choose(s, how):
        if how == "best":
            return rl.best_of(s, 2, step)
        if how == "most":
            return rl.majority(s, 2, step, "x")
        return rl.beam(s, step, key=lambda fork: 0, depth=2)

    @rl.function
    def program(s, how):
        s += "a"
        choose(s, how)
        s += "b" + rl.gen("y")

    @rl.function
    async def program_async(s, how):
        s += "a"
        await choose(s, how)
        s += "b" + rl.gen("y")

    for how in ("best", "most", "beam"):
        state = await asyncio.to_thread(program.run, how, stream=True)
        pieces = await asyncio.to_thread(lambda state=state: list(state.text_iter()))
        assert "".join(pieces) == state.text() and state["x"] in state.text()
        state = await program_async.run_async(how, stream=True)
        pieces = [piece async for piece in state.text_async_iter()]
        assert "".join(pieces) == state.text() and state["x"] in state.text()


def test_a_join_brings_back_what_forks_set_under_any_name() -> None:
    @rl.function
    def program(s):
        s += rl.gen("kept") + rl.gen("x")
        found = []
        for _ in range(2):
            with s.fork(2) as forks:
                mark = forks[0].mark()
                forks[0]["kept"] = "taken back"
                forks[0].rollback(mark)
                forks += rl.gen("x")
            with s.copy() as copy:
                copy += rl.gen("y")
            found.append((s["x"], s["y"]))
        return found

    backend = Scripted(kept="k", x=list("abcde"), y=list("fg"))
    state = program.run(backend=backend)
    assert state.ret_value == [(["b", "c"], ["f"]), (["d", "e"], ["g"])]
    assert state["kept"] == "k"


def test_texts_of_forks_that_went_back_are_joined_whole_or_not_at_all() -> None:
    @rl.function
    def program(s, before):
        s += "root"
        forks = s.fork(2)
        for fork in forks:
            fork += before
            mark = fork.mark()
            fork += "left"
            fork.rollback(mark)
            fork += "more"
        forks.join("concate_and_append")

    assert program.run("").text() == "rootmoremore"
    with pytest.raises(InvalidRequest, match="cannot be quoted"):
        program.run("before")


async def test_steps_may_be_awaited_and_have_several_samples(server: FakeServer) -> None:
    async def step(fork):
        fork += rl.gen("x")
        fork += "/" + await fork["x"]

    @rl.function
    async def program(s):
        value = await rl.majority(s, 2, step, "x")
        await rl.best_of(s, 2, rl.gen("y", n=2))
        return value, await s["y"]

    server.script = lambda text, op: "said"
    state = await program.run_async()
    assert state.ret_value == ("said", ["said", "said"]) and state.text() == "said/saidsaid"
