"""Programs in the style of sglang's frontend, which run after a change of the import line alone.

The gateway answers from a script, so the tests cover the language: the texts and their order that
reach the model, and the values that the program reads back.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import rootlace as sgl
from rootlace.wire import protocol
from tests.frontend.fake_server import FakeServer
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture(autouse=True)
def nothing_stays_behind(server: FakeServer, backend: sgl.RuntimeEndpoint) -> Any:
    yield
    eventually(lambda: server.open_branches == 0)


def test_few_shot_questions(server: FakeServer) -> None:
    capitals = {"Spain": " Madrid\nQ: next", "Peru": " Lima\n", "Chad": " N'Djamena"}
    server.script = lambda text, op: capitals[re.findall(r"of (\w+)\?\nA:$", text)[-1]]

    @sgl.function
    def few_shot_qa(s, question):
        s += "Answer like this.\n\n"
        s += "Q: What is the capital of France?\nA: Paris\n"
        s += "Q: " + question + "\n"
        s += "A:" + sgl.gen("answer", stop="\n", temperature=0)

    state = few_shot_qa.run(question="What is the capital of Spain?")
    assert state["answer"] == " Madrid"
    assert state.text().endswith("of Spain?\nA: Madrid")

    states = few_shot_qa.run_batch(
        [{"question": f"What is the capital of {c}?"} for c in ("Peru", "Chad", "Spain")],
        temperature=0.1,
        num_threads=2,
    )
    assert [s["answer"].strip() for s in states] == ["Lima", "N'Djamena", "Madrid"]
    assert {op.params.temperature for op in server.sent(protocol.Generate)} == {0}


def test_defaults_of_the_run_apply_where_gen_is_silent(server: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a") + sgl.gen("b", max_tokens=7, temperature=0.5, stop=["!"])

    program.run()
    program.run(max_new_tokens=99, temperature=0, top_p=0.9, stop="\n", ignore_eos=True)
    first, _, third, fourth = [op.params for op in server.sent(protocol.Generate)]
    assert (first.max_tokens, first.temperature, first.stop) == (128, 1.0, ())
    assert (third.max_tokens, third.temperature, third.stop) == (99, 0, ("\n",))
    assert (third.top_p, third.ignore_eos) == (0.9, True)
    assert (fourth.max_tokens, fourth.temperature, fourth.stop) == (7, 0.5, ("!",))


def test_multi_turn_chat(server: FakeServer) -> None:
    server.script = lambda text, op: f"reply {text.count('<|assistant|>')}"

    @sgl.function
    def conversation(s, first, second):
        s += sgl.system("Be brief.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("answer_1", max_tokens=64))
        with s.user():
            s += second
        with s.assistant():
            s += sgl.gen("answer_2")
        s.user("Thanks")
        s += sgl.assistant_begin() + "You are " + sgl.gen("answer_3") + sgl.assistant_end()

    state = conversation.run(first="Hello", second="And now?", temperature=0.7)
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "reply 1"},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "reply 2"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "You are reply 3"},
    ]
    assert state.text().startswith("<s><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>")


def test_select_and_its_meta_information(server: FakeServer) -> None:
    server.chooser = lambda text, op: 1 if "Rome is in France" in text else 0

    @sgl.function
    def true_or_false(s, statement):
        s += "Statement: " + statement + "\nThis is" + sgl.select("truth", [" true", " false"])
        s += "\nSure?" + sgl.gen(
            "sure", choices=[" yes", " no"], choices_method=sgl.greedy_token_selection
        )

    state = true_or_false.run(statement="Rome is in France.")
    assert state["truth"] == " false"
    meta = state.get_meta_info("truth")
    assert meta["normalized_prompt_logprobs"] == [-2.0, -1.0]
    assert meta["input_token_logprobs"][1] == [(-1.0, 1, " false")]
    methods = [op.method for op in server.sent(protocol.Select)]
    assert methods == ["token_length_normalized", "greedy_token_selection"]


def test_typed_and_constrained_generation(server: FakeServer) -> None:
    values = {"str": '"Lima"', "int": "42\n", "float": "3.5 ", "bool": "True"}
    server.script = lambda text, op: values.get(op.name, "10.0.0.1")

    @sgl.function
    def typed(s):
        s += sgl.gen_string("str") + sgl.gen_int("int") + sgl.gen("float", dtype=float)
        s += sgl.gen("bool", dtype="bool") + sgl.gen("ip", regex=r"(\d+\.){3}\d+", temperature=0)
        s += sgl.gen("object", json_schema={"type": "object"})

    state = typed.run()
    assert json.loads(state["str"]) == "Lima"
    assert (int(state["int"]), float(state["float"]), state["bool"]) == (42, 3.5, "True")
    state["int"] = int(state["int"])
    assert state["int"] == 42
    ops = {op.name: op for op in server.sent(protocol.Generate)}
    for name in ("str", "int", "float", "bool"):
        assert ops[name].constraint.kind == "regex"
        assert re.fullmatch(ops[name].constraint.source, values[name])
    assert ops["int"].params.stop == (" ", "\n")
    assert ops["ip"].constraint == protocol.Constraint("regex", r"(\d+\.){3}\d+")
    assert json.loads(ops["object"].constraint.source) == {"type": "object"}


def test_var_scope(server: FakeServer) -> None:
    server.script = lambda text, op: {"name": '"Rome"', "size": "12"}[op.name]

    @sgl.function
    def city(s):
        s += "A city: "
        with s.var_scope("json"):
            s += '{"name": ' + sgl.gen("name", dtype=str) + ', "size": ' + sgl.gen("size") + "}"
        s += "\n"
        return json.loads(s["json"])

    state = city.run()
    assert state.ret_value == {"name": "Rome", "size": 12}
    assert state["json"] == '{"name": "Rome", "size": 12}'


def test_var_scope_is_entered_again(server: FakeServer) -> None:
    @sgl.function
    def program(s):
        scope = s.var_scope("last")
        for text in ("a", "b"):
            with scope:
                s += text

    state = program.run()
    assert state["last"] == "b"
    assert state.text() == "ab"


def test_reading_in_the_middle_and_a_tool(server: FakeServer) -> None:
    server.script = lambda text, op: "6*7)=" if text.endswith("calculate(") else " done"

    @sgl.function
    def tool_use(s, question):
        s += question + " calculate(" + sgl.gen("expression", stop=")") + ") = "
        left, right = s["expression"].split("*")
        with s.var_scope("answer"):
            s += str(int(left) * int(right))
        s += "." + sgl.gen("end")

    state = tool_use(question="How much is it?", temperature=0)
    assert int(state["answer"]) == 42
    assert state.text() == "How much is it? calculate(6*7) = 42. done"


def test_parallel_reading_of_contexts(server: FakeServer) -> None:
    server.script = lambda text, op: " Noah" if "Statement 1: Noah is" in text else " nobody"

    @sgl.function
    def parallel_reading(s, question, contexts):
        s += "Remember:\n"
        forks = s.fork(len(contexts))
        forks += lambda i: f"Statement {i}: " + contexts[i] + "\n"
        forks.join(mode="concate_and_append")
        s += "Question: " + question + "\nAnswer:" + sgl.gen("answer", max_tokens=16)

    state = parallel_reading.run(question="Who?", contexts=["Liam is.", "Noah is.", "Ada is."])
    assert state["answer"] == " Noah"
    expected = "Remember:\nStatement 0: Liam is.\nStatement 1: Noah is.\nStatement 2: Ada is.\n"
    assert state.text() == expected + "Question: Who?\nAnswer: Noah"


def test_samples(server: FakeServer) -> None:
    server.script = lambda text, op: [f" {i}" for i in range(op.params.n)]

    @sgl.function
    def sampled(s):
        s += "x" + sgl.gen("many", n=3) + "y"

    state = sampled.run()
    assert state["many"] == [" 0", " 1", " 2"] and state.text() == "x 0y"
    assert [meta["completion_tokens"] for meta in state.get_meta_info("many")] == [2, 2, 2]


def test_bind(server: FakeServer) -> None:
    @sgl.function
    def greet(s, greeting, name, mark="!"):
        s += greeting + ", " + name + mark + sgl.gen("x")

    hello = greet.bind(greeting="Hello")
    assert hello.run(name="Ada").text().startswith("Hello, Ada!")
    assert hello.bind(name="Bob").run(mark="?").text().startswith("Hello, Bob?")
    texts = [s.text() for s in hello.run_batch([{"name": "A"}, {"name": "B"}])]
    assert [text[:9] for text in texts] == ["Hello, A!", "Hello, B!"]
    assert [s.text()[:5] for s in greet.run_batch([("Hi", "Al"), ["Hi", "Bo", "?"]])] == [
        "Hi, A",
        "Hi, B",
    ]


def test_streaming(server: FakeServer) -> None:
    server.script = lambda text, op: "one two three"

    @sgl.function
    def qa(s, question):
        s += sgl.system("Help.")
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer"))

    state = qa(question="Why?", stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text()
    assert state.text().endswith("<|assistant|>one two three<|end|>")
    assert len([p for p in pieces if p in "one two three"]) >= 4

    state = qa.run(question="Why?", stream=True)
    assert list(state.text_iter("answer")) == ["one", " tw", "o t", "hre", "e"]
    assert state["answer"] == "one two three"
    assert "".join(qa.stream(question="Why?")) == state.text()


def test_logprobs(server: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", return_logprob=True, top_logprobs_num=2, logprob_start_len=0)
        s += sgl.gen("b", logprobs=True, top_logprobs=3)

    state = program.run()
    first, second = [op.params for op in server.sent(protocol.Generate)]
    assert (first.logprobs, first.top_logprobs, first.prompt_logprobs_from) == (True, 2, 0)
    assert (second.logprobs, second.top_logprobs, second.prompt_logprobs_from) == (True, 3, None)
    meta = state.get_meta_info("a")
    assert meta["output_token_logprobs"][0] == (-0.5, 0, " ")
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    assert meta["completion_tokens"] == len(state["a"])


def test_copy_and_set_var(server: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += "x"
        s.set_var("chosen", 5)
        with s.copy() as attempt:
            attempt += " attempt" + sgl.gen("tried")
            s["length"] = len(attempt.text())
        s += " final" + sgl.gen("final")

    state = program.run()
    assert state.get_var("chosen") == 5 and state.get_meta_info("chosen") is None
    assert len(state["tried"]) == 1
    assert "attempt" not in state.text()
    assert state["length"] == len("x attempt" + state["tried"][0])


def test_printing_a_state_shows_its_text(server: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += "x"
        fork = s.fork(1)[0]
        fork += "y" + sgl.gen("a")
        return str(fork)

    state = program.run()
    assert str(state) == "ProgramState(x)"
    assert re.fullmatch(r"ProgramState\(xy.+\)", state.ret_value)
    assert "a" not in repr(state).partition("variables=")[2]


def test_flush_and_info(server: FakeServer) -> None:
    sgl.flush_cache()
    assert server.flushes == 1
    info = sgl.get_server_info()
    assert info is not None and info["model"]["name"] == "fake"
