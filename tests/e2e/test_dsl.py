"""Programs on a real runtime: sockets, processes, the embedded model.

The tests do not judge the model's words (evaluate.py of the demo model does). They check that
programs get the same words with a warm cache and a cold one, in forks and without, streamed and
not, and never another program's words.
"""

from __future__ import annotations

import _thread
import asyncio
import gc
import inspect
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import rootlace as rl
from rootlace.wire.errors import (
    ContextLengthExceeded,
    InvalidConstraint,
    InvalidRequest,
    ServerUnavailable,
)
from tests.waiting import eventually

FEW_SHOT = (
    "Review: I loved every minute of it.\nLabel: positive\n\n"
    "Review: A waste of my evening.\nLabel: negative\n\n"
)


@pytest.fixture(autouse=True)
def nothing_stays_behind(runtime: rl.Runtime) -> Iterator[None]:
    # Earlier tests' clients may have left kept responses for a while.
    kept = runtime.get_server_info()["branches"]
    rl.set_default_backend(runtime)
    yield
    rl.set_default_backend(None)
    gc.collect()
    eventually(
        lambda: (info := runtime.get_server_info())["branches"] <= kept and not info["running"]
    )


@rl.function
def review(s, text):
    s += FEW_SHOT
    s += "Review: " + text + "\nLabel:"
    s += rl.select("label", [" positive", " negative"])
    s += "\n\nReason:" + rl.gen("reason", max_tokens=12, stop="\n")
    s += "\n\nIn short:" + rl.gen("short", max_tokens=6)


REVIEWS = [f"The {thing} was {word}." for thing in ("plot", "cast") for word in ("great", "awful")]


def test_one_round_trip_for_a_straight_line_program(runtime: rl.Runtime) -> None:
    counters = runtime.endpoint.connect().counters
    before = counters.round_trips
    state = review.run("Splendid.", temperature=0)
    assert counters.round_trips - before <= 1
    assert state["label"] in (" positive", " negative")
    assert state.text().startswith(FEW_SHOT + "Review: Splendid.\nLabel:" + state["label"])


def test_warm_cold_and_batched_say_the_same(runtime: rl.Runtime) -> None:
    cold = []
    for text in REVIEWS:
        rl.flush_cache()
        cold.append(review.run(text, temperature=0).text())
    warm = [review.run(text, temperature=0).text() for text in REVIEWS]
    rl.flush_cache()
    states = review.run_batch([{"text": text} for text in REVIEWS], temperature=0)
    assert warm == cold
    assert all(len(text) > len(FEW_SHOT + "Review: \nLabel: positive") for text in cold)
    assert [state.text() for state in states] == cold
    # The examples were computed once, and every program found them cached.
    for state in states:
        assert state.get_meta_info("label")["cached_tokens"] > 20


def test_the_cache_explains_itself(runtime: rl.Runtime) -> None:
    @rl.function
    def stamped(s, time):
        s += f"Log of the day.\nAt {time} the light was"
        s += rl.gen("next", max_tokens=1, temperature=0, return_cache_report=True)

    def report(time: str) -> dict[str, Any]:
        return stamped.run(time).get_meta_info("next")["cache_report"]

    rl.flush_cache()
    assert report("10:30")["matched"] == 0
    again = report("10:30")
    assert again["reason"] == "whole" and again["matched"] == again["limit"] > 10
    differs = report("10:45")
    assert differs["reason"] == "differs" and 0 < differs["matched"] < differs["limit"]
    assert differs["before"].endswith(("10:", "At 10", "At 10:", "At"))
    assert differs["goes_on"].startswith(("45", ":45", "4", " 10:45"))
    assert differs["cached_instead"] != differs["goes_on"]
    rl.flush_cache()
    assert report("10:45")["reason"] == "flushed"


def test_a_fork_continues_as_its_parent_would(runtime: rl.Runtime) -> None:
    @rl.function
    def forked(s, width):
        s += FEW_SHOT + "Review: The light was beau"
        forks = s.fork(width)
        # The word continues in the fork: tokens may end elsewhere than pieces of text.
        forks += lambda i: "tiful" + " and" * i + rl.gen("next", max_tokens=10)
        forks.join()

    @rl.function
    def straight(s, i):
        s += FEW_SHOT + "Review: The light was beautiful" + " and" * i
        s += rl.gen("next", max_tokens=10)

    rl.flush_cache()
    forked_texts = forked.run(3, temperature=0)["next"]
    rl.flush_cache()
    assert forked_texts == [straight.run(i, temperature=0)["next"] for i in range(3)]


def test_joining_appends_what_the_forks_said(runtime: rl.Runtime) -> None:
    @rl.function
    def joined(s):
        s += "Facts:\n"
        forks = s.fork(2)
        forks += lambda i: f"Fact {i}:" + rl.gen("fact", max_tokens=8, stop="\n") + "\n"
        forks.join("concate_and_append")
        s += "So:" + rl.gen("so", max_tokens=8)

    @rl.function
    def replay(s, text):
        s += text + rl.gen("so", max_tokens=8)

    state = joined.run(temperature=0)
    prompt = state.text()[: len(state.text()) - len(state["so"])]
    assert re.fullmatch(r"Facts:\nFact 0:.*\nFact 1:.*\nSo:", prompt)
    assert replay.run(prompt, temperature=0)["so"] == state["so"]


def test_a_conversation_hits_the_cache_to_the_last_turn(runtime: rl.Runtime) -> None:
    @rl.function
    def chat(s):
        s += rl.user("Hello, who are you?")
        s += rl.assistant(rl.gen("first", max_tokens=16))
        with s.user():
            s += "Thank you."
        with s.assistant():
            s += rl.gen("second", max_tokens=16)

    rl.flush_cache()
    state = chat.run(temperature=0)
    assert [message["role"] for message in state.messages()] == [
        "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    first, second = state.get_meta_info("first"), state.get_meta_info("second")
    said = first["prompt_tokens"] + first["completion_tokens"]
    assert second["cached_tokens"] >= said - 1
    assert state.messages()[1]["content"] == state["first"].lstrip()


@rl.function
def turn(s, question):
    s += rl.user(question)
    s += rl.assistant(rl.gen("answer", max_tokens=30, temperature=0))


def test_an_ended_conversation_goes_on_as_if_it_had_not(runtime: rl.Runtime) -> None:
    @rl.function
    def both(s):
        turn(s, "Hello, my name is Anna.")
        return turn(s, "What is my name?")

    runtime.flush_cache()
    state = both.run()
    second = state.ret_value
    for keep in (lambda state: state, lambda state: rl.State.from_json(state.to_json())):
        runtime.flush_cache()
        later = turn.run("What is my name?", after=keep(turn.run("Hello, my name is Anna.")))
        assert later.text() == state.text()
        for count in ("prompt_tokens", "cached_tokens"):
            assert later.get_meta_info("answer")[count] == second.get_meta_info("answer")[count]


def test_what_is_tried_again_has_its_beginning_cached(runtime: rl.Runtime) -> None:
    prompt = FEW_SHOT + "Review: Dull.\nLabel:"

    @rl.function
    def program(s):
        s += prompt
        seen = []
        for attempt in s.retry(3, on=ValueError):
            with attempt:
                s += rl.gen("x", max_tokens=2)
                seen.append(s.get_meta_info("x")["cached_tokens"])
                if len(seen) < 3:
                    raise ValueError
        s += "\nAgain: "
        value = rl.majority(s, 3, rl.gen("y", regex="[ab]", seed=1), "y")
        score = rl.best_of(s, 3, rl.gen("z", max_tokens=2))
        return seen, value, score

    runtime.flush_cache()
    state = program.run()
    seen, value, score = state.ret_value
    assert seen[0] < seen[1] == seen[2] and score <= 0
    assert state.text() == f"{prompt}{state['x']}\nAgain: {value}{state['z']}"


def test_the_model_calls_functions(runtime: rl.Runtime) -> None:
    def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression."""
        return {"37*12": "444"}[expression]

    def lookup(query: str) -> str:
        """Look up a fact."""
        return "unknown"

    tools = rl.tools(calculator, lookup)

    @rl.function
    def agent(s, choice):
        s += rl.system("You are a helpful assistant." + tools) + rl.user("What is 37 times 12?")
        s += rl.assistant(
            rl.gen("call", tools=tools, tool_choice=choice, temperature=0, max_tokens=80)
        )
        return s.call_tools()

    for choice in ("auto", "required", "calculator"):
        (call,) = agent.run(choice).ret_value
        assert (call.name, call.arguments, call.result) == (
            "calculator",
            {"expression": "37*12"},
            "444",
        )
    assert agent.run("lookup").ret_value[0].name == "lookup"


def test_constrained_values(runtime: rl.Runtime) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }

    @rl.function
    def constrained(s):
        s += "Code: " + rl.gen("code", regex=r"[A-Z]{3}-[0-9]{2}", max_tokens=32)
        s += "\nNumber: " + rl.gen_int("number", max_tokens=8)
        s += "\nSwitch: " + rl.gen("switch", dtype=bool)
        s += "\nObject: " + rl.gen("object", json_schema=schema, max_tokens=96)

    state = constrained.run(temperature=1.0)
    assert re.fullmatch(r"[A-Z]{3}-[0-9]{2}", state["code"])
    assert re.fullmatch(r"[-+]?[0-9]+", state["number"]) or state["number"] == ""
    assert state["switch"] in ("True", "False")
    value = json.loads(state["object"])
    assert set(value) == {"name", "ok"} and isinstance(value["ok"], bool)


def test_samples_and_seeds(runtime: rl.Runtime) -> None:
    @rl.function
    def sampled(s, seed):
        s += "The " + rl.gen("words", n=4, max_tokens=8, seed=seed) + rl.gen("more", max_tokens=3)

    one, same, other = (sampled.run(seed) for seed in (1, 1, 2))
    assert one["words"] == same["words"] != other["words"]
    assert len(set(one["words"])) > 1
    assert one.text().startswith("The " + one["words"][0])

    @rl.function
    def chosen(s):
        said = []

        def longest(fork):
            said.append(fork["words"])
            return len(fork["words"])

        s += "The "
        rl.best_of(s, 4, rl.gen("words", max_tokens=8), key=longest)
        return said

    assert chosen.run(seed=1).ret_value == one["words"]


@rl.function
def rewrite(s, pattern, before):
    s += "Once there was a" + rl.gen("text", max_tokens=80, regex=pattern, prediction=before)


@pytest.mark.parametrize(
    "pattern", [r"([a-z]{3,8} ){12}", r'\{"name": "[a-z]{3,9}", "story": "[a-z ,.]{40,60}"\}']
)
def test_a_prediction_saves_steps_and_changes_nothing(runtime: rl.Runtime, pattern: str) -> None:
    def asked(before: str | None, **options: Any) -> tuple[rl.State, int]:
        steps = runtime.get_server_info()["steps"]
        given = {"temperature": 0.8, "seed": 3, "logprobs": True, **options}
        state = rewrite.run(pattern, before, **given)
        return state, runtime.get_server_info()["steps"] - steps

    plain, plain_steps = asked(None)
    text, meta = plain["text"], plain.get_meta_info("text")
    assert "accepted_prediction_tokens" not in meta
    for before in (text, text.replace("a", "e", 1), "something else " * 9, text + text):
        saved = False
        # Drafts pay by measurement, and a pause of the machine may turn drafts off for a while.
        for attempt in range(12):
            state, steps = asked(before, stream=bool(attempt % 2))
            again = state.get_meta_info("text")
            assert state["text"] == text
            assert again["output_token_logprobs"] == meta["output_token_logprobs"]
            accepted = again.get("accepted_prediction_tokens", 0)
            saved = saved or (steps <= plain_steps / 2 and accepted > 5)
            if attempt and (saved or not before.startswith(text)):
                break
        assert saved or not before.startswith(text)
    with pytest.raises(InvalidRequest, match="prediction must be text"):
        rl.gen("text", prediction=3)  # type: ignore[arg-type]


def test_streams_are_what_the_run_says(runtime: rl.Runtime) -> None:
    @rl.function
    def words(s, start):
        s += start + rl.gen("first", max_tokens=24, ignore_eos=True)
        s += "\n" + rl.select("which", ["one", "two"]) + rl.gen("second", max_tokens=5)

    start = "Wonderful, naïve, 素晴らしい: "
    whole = words.run(start, temperature=0)
    assert "".join(words.stream(start, temperature=0)) == whole.text()
    state = words.run(start, temperature=0, stream=True)
    pieces = list(state.text_iter("first"))
    assert "".join(pieces) == whole["first"]
    assert len(pieces) > 1  # 24 tokens do not come in one step
    assert state.text() == whole.text()


@pytest.mark.parametrize("ends", [{"max_tokens": 12}, {"max_tokens": 40, "stop": "e"}])
async def test_pairs_of_a_stream_have_the_scores_of_their_own_tokens(
    runtime: rl.Runtime, ends: dict[str, Any]
) -> None:
    """sglang's own test of streams checks the same (`test_stream_logprobs`)."""

    @rl.function
    def program(s):
        s += "Count: " + rl.gen("n", temperature=0, return_logprob=True, top_logprobs_num=2, **ends)

    state = program.run(backend=runtime, stream=True)
    told, text, scores, tops = 0, "", [], []
    async for piece, meta in state.text_async_iter("n", return_meta_data=True):
        assert piece and meta["output_token_logprobs_length"] == meta["completion_tokens"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] - told
        told, text = meta["completion_tokens"], text + piece
        scores += meta["output_token_logprobs"]
        tops += meta["output_top_logprobs"]
    final = state.get_meta_info("n")
    assert text == state["n"]
    assert scores == final["output_token_logprobs"][: len(scores)]
    assert tops == final["output_top_logprobs"][: len(tops)]


async def test_hundreds_of_programs_on_one_loop(runtime: rl.Runtime) -> None:
    @rl.function
    async def agent(s, number):
        s += f"Count on from {number}:" + rl.gen("a", max_tokens=4)
        s += f" ({len(await s['a'])})" + rl.gen("b", max_tokens=4)

    arguments = [{"number": i} for i in range(300)]
    states = await agent.run_batch_async(arguments, temperature=0)
    again = await asyncio.gather(*[agent.run_async(i, temperature=0) for i in range(0, 300, 50)])
    assert [state.error() for state in states] == [None] * 300
    assert [state.text() for state in states[::50]] == [state.text() for state in again]


def test_failures_name_the_line_and_the_reason(runtime: rl.Runtime) -> None:
    @rl.function
    def wrong(s, pattern):
        s += "x" + rl.gen("fine", max_tokens=2)
        s += rl.gen("bad", regex=pattern)  # here
        s += rl.gen("after")

    lines, start = inspect.getsourcelines(wrong.func)
    line = start + next(i for i, text in enumerate(lines) if "# here" in text)
    states = wrong.run_batch([{"pattern": "[0-9]{2}"}, {"pattern": "(unclosed"}], max_tokens=4)
    assert states[0].error() is None and len(states[0]["bad"]) == 2
    error = states[1].error()
    assert isinstance(error, rl.ProgramError)
    assert (error.filename, error.lineno) == (__file__, line)
    assert error.code == "invalid_constraint" and isinstance(error.__cause__, InvalidConstraint)

    @rl.function
    def endless(s):
        s += "word " * 100_000 + rl.gen("x")

    with pytest.raises(rl.ProgramError) as caught:
        endless.run()
    assert isinstance(caught.value.__cause__, ContextLengthExceeded)


def test_what_is_given_up_is_cancelled_on_the_server(runtime: rl.Runtime) -> None:
    @rl.function
    def long(s):
        s += "On and on" + rl.gen("x", max_tokens=None, ignore_eos=True)
        raise KeyError("given up")

    with pytest.raises(KeyError, match="given up"):
        long.run(max_tokens=400)
    # `nothing_stays_behind` finds no branch and no running request.


def test_a_batch_that_is_given_up_is_cancelled_while_it_waits(runtime: rl.Runtime) -> None:
    @rl.function
    def long(s, number):
        s += f"{number}: on and on" + rl.gen("x", max_tokens=1500, ignore_eos=True)

    states = long.run_batch([(i,) for i in range(40)], generator_style=True)
    threads = threading.active_count()
    interrupt = threading.Timer(0.3, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        interrupt.start()
        for _ in states:
            pass
    interrupt.join()
    # 60,000 tokens would take longer than this; the check for an idle server follows.
    eventually(lambda: threading.active_count() <= threads)


def test_the_http_address_leads_to_the_programs(runtime: rl.Runtime) -> None:
    assert runtime.url is not None
    endpoint = rl.RuntimeEndpoint(runtime.url)
    assert endpoint.model_info == runtime.endpoint.model_info
    state = review.run("Fine.", temperature=0, backend=endpoint)
    assert state.text() == review.run("Fine.", temperature=0).text()
    endpoint.close()


def test_any_openai_server_runs_the_same_program(runtime: rl.Runtime) -> None:
    elsewhere = rl.OpenAIBackend(f"{runtime.url}/v1", continues=True)

    @rl.function
    def program(s):
        turn(s, "What is 37 times 12?")
        s += rl.user("Say hello.") + rl.assistant("Hello" + rl.gen("rest", temperature=0))

    there, here = program.run(backend=elsewhere), program.run()
    assert there.messages() == here.messages()
    assert "".join(program.stream(backend=elsewhere)) == there.text()
    elsewhere.close()


def test_the_offline_engine_agrees_with_programs(demo_model: Path, runtime: rl.Runtime) -> None:
    @rl.function
    def plain(s, prompt):
        s += prompt + rl.gen("x", max_tokens=8)

    prompts = [FEW_SHOT + text for text in REVIEWS]
    expected = [state["x"] for state in plain.run_batch([(p,) for p in prompts], temperature=0)]
    with rl.Engine(model_path=demo_model, dtype="float32", threads=1, num_blocks=256) as engine:
        params = {"max_new_tokens": 8, "temperature": 0}
        replies = engine.generate(prompts, params)
        assert [reply["text"] for reply in replies] == expected
        *_, last = engine.generate(prompts[0], params, stream=True)
        assert last["text"] == expected[0]
        ids = replies[0]["output_ids"]
        assert replies[0]["meta_info"]["completion_tokens"] == len(ids)
        empty: Any = engine.generate(input_ids=ids, sampling_params={**params, "max_new_tokens": 0})
        assert empty["text"] == "" and empty["meta_info"]["prompt_tokens"] == len(ids)
    with pytest.raises(ServerUnavailable):
        engine.generate("x")


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(rl.RootlaceError, match=re.escape(str(tmp_path / "none"))):
        rl.Runtime(tmp_path / "none", launch_timeout=240)


def test_a_head_of_one_label_ranks_pairs(demo_model: Path, tmp_path: Path) -> None:
    """sentence-transformers' CrossEncoder and vLLM rank so: by the sigmoid of the model's logit for
    both texts, as the tokenizer joins them."""
    AutoTokenizer.from_pretrained(demo_model).save_pretrained(tmp_path)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(
        demo_model, num_labels=1, dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    documents = ["A cat.", "It was warm and the sun shone.", "No."]
    with torch.inference_mode():
        pairs = [tokenizer("Where?", text, return_tensors="pt").input_ids for text in documents]
        wanted = [float(torch.sigmoid(model(pair).logits)[0, 0]) for pair in pairs]
    assert max(wanted) - min(wanted) > 1e-3
    with rl.Runtime(tmp_path, http_port=0, dtype="float32", threads=1, num_blocks=64) as started:
        pair = {"text_1": "Where?", "text_2": documents}
        scored = httpx.post(f"{started.url}/v1/score", json=pair).json()
        query = {"query": "Where?", "documents": documents}
        ranked = httpx.post(f"{started.url}/v1/rerank", json=query).json()
    assert scored["method"] == ranked["method"] == "cross-encoder"
    assert [one["score"] for one in scored["data"]] == pytest.approx(wanted, abs=1e-4)
    assert scored["usage"]["prompt_tokens"] == sum(pair.shape[1] for pair in pairs)
    order = sorted(range(3), key=lambda index: -wanted[index])
    assert [one["index"] for one in ranked["results"]] == order


def test_vectors_of_texts(runtime: rl.Runtime, demo_model: Path) -> None:
    texts = ["A waste of my evening.", "I loved it."]
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModel.from_pretrained(demo_model, dtype=torch.float32).eval()
    ids = [tokenizer(text).input_ids for text in texts]
    with torch.inference_mode():
        states = [model(torch.tensor([one])).last_hidden_state[0] for one in ids]
    means = runtime.embed([texts[0], ids[1]], pooling="mean", normalise=False)
    for found, wanted in zip(means, states, strict=True):
        assert torch.allclose(torch.tensor(found), wanted.mean(0), atol=1e-4)
    last = asyncio.run(runtime.async_embed(texts))
    for found, wanted in zip(last, states, strict=True):
        assert torch.allclose(torch.tensor(found), wanted[-1] / wanted[-1].norm(), atol=1e-5)
    with pytest.raises(InvalidRequest, match="no head that scores labels"):
        runtime.embed(texts, pooling="labels")
    with pytest.raises(ContextLengthExceeded):
        runtime.embed([[5] * 100_000])
