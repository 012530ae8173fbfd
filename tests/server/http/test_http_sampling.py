"""Defaults of sampling parameters: from options, from models, and by interface."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.model.checkpoint.source import FolderSource, ModelSource, model_source
from rootlace.runtime.server.http.body import decode_body
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.openai_completions import ChatBody, CompletionBody
from rootlace.runtime.server.http.sglang_generate import GenerateBody
from rootlace.runtime.server.model_texts import ModelTexts, check_sampling, load_sampling
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Append, Generate, Open
from rootlace.wire.sampling import TUNED, SamplingParams
from tests.model.gguf.converting import finish
from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import FakeModel
from tests.server.operations import MakeClient, text
from tests.tiny_model import make_tiny_model

FILE = "generation_config.json"
QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def folder_with(folder: Path, **given: Any) -> FolderSource:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(given))
    return FolderSource(folder)


def defaults_of(source: ModelSource, **options: Any) -> tuple[dict[str, float], dict[str, str]]:
    given = {"model": "m", "program_address": "", **options}
    return load_sampling(source, GatewayConfig(**given))


# ---------------------------------------------------------------- sources of defaults


def test_a_folder_recommends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that are common in such files cause no warning."""
    source = folder_with(
        tmp_path,
        **QWEN,
        do_sample=True,
        bos_token_id=1,
        eos_token_id=[2, 3],
        pad_token_id=2,
        transformers_version="4.51.0",
        _from_model_config=True,
        max_length=4096,
        min_p=None,
        num_beams=1,
        typical_p=1.0,
        use_cache=False,
        cache_implementation="hybrid",
        output_scores=True,
        no_repeat_ngram_size=0,
        max_new_tokens=2048,
    )
    values, origins = defaults_of(source)
    assert values == {**QWEN, "max_tokens": 2048}
    assert origins == dict.fromkeys(values, FILE)
    assert defaults_of(FolderSource(tmp_path / "nothing")) == ({}, {})
    assert not caplog.records


def test_what_cannot_be_applied_is_logged_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {
        "temperature": -1,
        "top_p": "a lot",
        "top_k": 1.5,
        "repetition_penalty": True,
        "min_p": 7,
        "num_beams": 4,
        "typical_p": 0.9,
        "stop_strings": ["###"],
        "temprature": 0.5,
    }
    values, origins = defaults_of(folder_with(tmp_path, **wrong, frequency_penalty=0.5, top_h=None))
    assert values == {"frequency_penalty": 0.5} and origins.keys() == values.keys()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(wrong) and all(one.startswith(FILE) for one in said)
    for key, line in zip(wrong, said, strict=True):
        assert key in line


def test_greedy_and_off_are_read(tmp_path: Path) -> None:
    values, _ = defaults_of(folder_with(tmp_path, temperature=0, top_k=0, top_p=1, do_sample=False))
    assert values == {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    # transformers' default of `do_sample`, which is no recommendation for the model.
    assert defaults_of(folder_with(tmp_path, do_sample=False)) == ({}, {})


def test_a_gguf_file_recommends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names are llama.cpp's; numbers are restored from their float32 rounding."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.7)
    writer.add_float32("general.sampling.top_p", 0.95)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.min_p", 0.0)
    writer.add_float32("general.sampling.penalty_repeat", 1.05)
    writer.add_float32("general.sampling.xtc_probability", 0.0)
    writer.add_int32("general.sampling.mirostat", 2)
    writer.add_tensor("x", np.zeros(32, np.float32))
    source = model_source(finish(writer, path))
    values, origins = defaults_of(source)
    assert values == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }
    assert origins == dict.fromkeys(values, "m.gguf")
    assert [record.getMessage() for record in caplog.records] == [
        "m.gguf: mirostat 2 has no effect"
    ]
    assert defaults_of(source, generation_config="none") == ({}, {})


def test_the_list_of_packaged_models_recommends_for_a_file_that_does_not(tmp_path: Path) -> None:
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.touch()
    silent: Any = SimpleNamespace(path=path, generation_config=lambda: (path.name, {}))
    assert defaults_of(silent) == ({}, {})  # a file of this name, but not that model
    os.truncate(path, 98_362_432)
    values, origins = defaults_of(silent)
    assert values == {"temperature": 0.7}
    assert origins == dict.fromkeys(values, "packaged.toml")
    assert defaults_of(silent, generation_config="none") == ({}, {})
    own: Any = SimpleNamespace(path=path, generation_config=lambda: ("own", {"top_k": 5}))
    assert defaults_of(own) == ({"top_k": 5}, {"top_k": "own"})


def test_options_come_before_the_model(tmp_path: Path) -> None:
    source = folder_with(tmp_path / "model", **QWEN)
    folder_with(tmp_path / "other", temperature=0.3, min_p=0.1)
    for path in (tmp_path / "other", tmp_path / "other" / FILE):
        values, origins = defaults_of(source, generation_config=str(path))
        assert values == {"temperature": 0.3, "min_p": 0.1} and set(origins.values()) == {FILE}
    given = ("temperature=0.2, top_k=-1", "max_new_tokens=9")
    values, origins = defaults_of(source, default_sampling=given)
    assert values == {**QWEN, "temperature": 0.2, "top_k": -1, "max_tokens": 9}
    assert [key for key, origin in origins.items() if origin == FILE] == [
        "top_p",
        "repetition_penalty",
    ]
    alone, _ = defaults_of(source, generation_config="none", default_sampling=given)
    assert alone == {"temperature": 0.2, "top_k": -1, "max_tokens": 9}


@pytest.mark.parametrize(
    "given, expected",
    [
        ("temprature=0.5", "no parameter 'temprature'; did you mean temperature"),
        ("stop=x", "no parameter 'stop'"),
        ("temperature", "'temperature' is not KEY=VALUE"),
        ("temperature=hot", "temperature must be a number, not 'hot'"),
        ("temperature=nan", "temperature must be in"),
        ("top_k=1.5", "top_k must be an integer, not '1.5'"),
        ("top_p=1.5", "top_p must be in"),
    ],
)
def test_wrong_options_are_refused(given: str, expected: str) -> None:
    config = GatewayConfig(model="m", program_address="", default_sampling=(given,))
    with pytest.raises(InvalidRequest, match="--default-sampling: ") as raised:
        check_sampling(config)
    assert expected in str(raised.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / FILE, tmp_path / "x.json"):
        config = GatewayConfig(model="m", program_address="", generation_config=str(path))
        with pytest.raises(InvalidRequest, match="nor a folder with one"):
            check_sampling(config)


def test_the_log_says_what_is_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = make_tiny_model(tmp_path / "tiny")
    config = GatewayConfig(model=str(folder), program_address="")
    ModelTexts.read(config).log_sampling("tiny")
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("tiny recommends no sampling: ")
    assert "--default-sampling temperature=0.7" in line.getMessage()
    # A bound on the length is no parameter of sampling.
    caplog.clear()
    config = GatewayConfig(
        model=str(folder), program_address="", default_sampling=("max_tokens=5",)
    )
    ModelTexts.read(config).log_sampling("tiny")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "default sampling of tiny: max_tokens 5 (--default-sampling)"
    assert said[1].startswith("tiny recommends no sampling: ") and len(said) == 2
    caplog.clear()
    folder_with(folder, temperature=0.6)
    config = GatewayConfig(model=str(folder), program_address="", default_sampling=("top_k=5",))
    ModelTexts.read(config).log_sampling("tiny")
    (line,) = caplog.records
    assert line.getMessage() == (
        f"default sampling of tiny: temperature 0.6 ({FILE}), top_k 5 (--default-sampling)"
    )


# ---------------------------------------------------------------- over HTTP

HELLO = [{"role": "user", "content": "hi"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi", "store": False}),
    "anthropic": ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "model": "fake"}),
    "ollama chat": ("/api/chat", {"messages": HELLO, "model": "fake", "stream": False}),
    "ollama generate": ("/api/generate", {"prompt": "hi", "model": "fake", "stream": False}),
    "ollama raw": (
        "/api/generate",
        {"prompt": "hi", "model": "fake", "stream": False, "raw": True},
    ),
    "sglang": ("/generate", {"text": "hi"}),
}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
OLLAMA = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
each = pytest.mark.parametrize("name", CALLS)


def model_of(**sampling: float) -> FakeModel:
    model = FakeModel()
    model.model_info = msgspec.structs.replace(
        model.model_info,
        sampling=sampling,
        sampling_from=dict.fromkeys(sampling, FILE),
    )
    return model


def said(name: str, **given: float) -> dict[str, Any]:
    """Return a body with these values under the interface's own names."""
    _, body = CALLS[name]
    if name.startswith("ollama"):
        names = {"repetition_penalty": "repeat_penalty"}
        return {**body, "options": {names.get(key, key): value for key, value in given.items()}}
    return {**body, "sampling_params": given} if name == "sglang" else {**body, **given}


async def params_of(served: Served, name: str, **given: float) -> SamplingParams:
    assert (await served.post(CALLS[name][0], said(name, **given))).status == 200
    return served.model.last_generate.params


def drawn(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in NEUTRAL}


@each
async def test_without_a_recommendation_the_interface_decides(served: Served, name: str) -> None:
    params = await params_of(served, name)
    assert drawn(params) == (OLLAMA if name.startswith("ollama") else NEUTRAL)
    limit = {"completions": 16, "sglang": 128, "anthropic": 9}
    assert params.max_tokens == limit.get(name)


@each
async def test_the_model_decides_what_a_request_does_not(serve: Serve, name: str) -> None:
    served = await serve(model_of(**QWEN, max_tokens=77))
    params = await params_of(served, name)
    assert drawn(params) == {key: QWEN[key] for key in NEUTRAL}
    assert params.repetition_penalty == 1.05
    assert set(params.given) == set(TUNED)  # `Generation` has no default left to fill in
    limit = {"completions": 16, "sglang": 128, "anthropic": 9}
    assert params.max_tokens == limit.get(name, 77)


@each
async def test_a_request_wins_with_the_default_of_its_interface(serve: Serve, name: str) -> None:
    served = await serve(model_of(**QWEN))
    params = await params_of(served, name, temperature=1.0, top_p=1)
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 20)
    params = await params_of(served, name, temperature=0, top_k=0)
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.8, 0)
    if name != "anthropic":  # Anthropic's interface has no such parameter
        params = await params_of(served, name, repetition_penalty=1.0)
        assert (params.temperature, params.repetition_penalty) == (0.7, 1.0)


@each
async def test_one_recommendation_leaves_the_rest_to_the_interface(serve: Serve, name: str) -> None:
    served = await serve(model_of(temperature=0.6))
    usual = OLLAMA if name.startswith("ollama") else NEUTRAL
    assert drawn(await params_of(served, name)) == {**usual, "temperature": 0.6}


async def test_a_request_for_no_limit_wins(serve: Serve) -> None:
    served = await serve(model_of(max_tokens=77))
    assert (await params_of(served, "ollama chat", num_predict=-1)).max_tokens is None
    assert (await params_of(served, "ollama chat", num_predict=99)).max_tokens == 99
    assert (await params_of(served, "chat", max_completion_tokens=99)).max_tokens == 99
    assert (await params_of(served, "responses", max_output_tokens=99)).max_tokens == 99
    async with served.http.post(
        "/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": None}}
    ) as reply:
        assert reply.status == 200
    assert served.model.last_generate.params.max_tokens is None


async def test_a_request_for_more_than_the_default_bound_wins(serve: Serve) -> None:
    served = await serve(model_of(max_tokens=7))
    for name in ("chat", "responses"):
        params = await params_of(served, name, min_tokens=9)
        assert (params.min_tokens, params.max_tokens) == (9, 9)
        assert (await params_of(served, name, min_tokens=5)).max_tokens == 7


async def test_ollamas_seed_of_minus_one_is_left_open(served: Served) -> None:
    assert (await params_of(served, "ollama chat", seed=-1)).seed is None
    assert (await params_of(served, "ollama chat", seed=7)).seed == 7


async def test_ollama_takes_what_llama_cpp_takes(served: Served) -> None:
    params = await params_of(served, "ollama chat", temperature=-1, top_k=-5)
    assert (params.temperature, params.top_k) == (0.0, 0)  # greedy, and off


@each
async def test_edges_that_other_servers_take(served: Served, name: str) -> None:
    params = await params_of(served, name, top_p=0, temperature=0.5)
    assert (params.top_p, params.temperature) == (0.0, 0.5)
    for off in (0, -1):
        assert (await params_of(served, name, top_k=off)).top_k in (off, 0)
    if name != "anthropic":
        for edge in (0, 1):
            assert (await params_of(served, name, min_p=edge)).min_p == edge


@each
async def test_an_integral_number_is_an_integer(served: Served, name: str) -> None:
    limit = {"responses": "max_output_tokens", "sglang": "max_new_tokens"}.get(name, "max_tokens")
    limit = "num_predict" if name.startswith("ollama") else limit
    params = await params_of(served, name, **{limit: 3.0, "top_k": 40.0})
    assert (params.max_tokens, params.top_k) == (3, 40)
    assert type(params.max_tokens) is type(params.top_k) is int
    async with served.http.post(CALLS[name][0], json=said(name, **{limit: 3.5})) as reply:
        assert reply.status == 400
        assert limit in await reply.text()


def read(kind: Any, body: dict[str, Any]) -> Any:
    return decode_body(json.dumps(body).encode(), kind)


def test_integral_numbers_wherever_they_stand() -> None:
    given = {"stop_token_ids": [3.0, 4], "logit_bias": {"5": 1}, "seed": -7.0, "n": 1.0}
    for prompt, expected in (([1.0, 2], [1, 2]), ([[1.0, 2], [3.0]], [[1, 2], [3]])):
        body = read(CompletionBody, {**given, "prompt": prompt})
        assert body.prompt == expected and body.stop_token_ids == (3, 4)
        assert (body.seed, body.n, body.logit_bias) == (-7, 1, {5: 1.0})
    within = {
        "sampling_params": [{"max_new_tokens": 3.0}],
        "session_params": {"id": "s", "offset": -1.0},
    }
    body = read(GenerateBody, {"text": ["x"], **within})
    assert body.sampling_params[0].max_new_tokens == 3 and body.session_params.offset == -1


def test_numbers_that_are_no_integers_stay_what_they_are() -> None:
    """A client's schema stays unchanged; an error names the number's place."""
    schema = {"const": 3.0, "multipleOf": 0.5}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = read(ChatBody, {"messages": HELLO, "max_tokens": 3.0, "n": 1.0, "tools": [tool]})
    assert (body.max_tokens, body.n) == (3, 1)
    found = body.tools[0].function.parameters
    assert found == schema and type(found["const"]) is float
    for wrong in (3.5, 1e300, True, "3"):
        with pytest.raises(InvalidParameter, match=r"^max_tokens: expected `int") as raised:
            read(ChatBody, {"messages": HELLO, "n": 1.0, "max_tokens": wrong, "seed": 2.0})
        assert raised.value.param == "max_tokens"
    with pytest.raises(InvalidParameter, match=r"^prompt"):
        read(CompletionBody, {"prompt": [1.0, 2.5]})
    with pytest.raises(InvalidParameter, match="max_token"):  # unknown, beside a number to be read
        read(ChatBody, {"messages": HELLO, "seed": 2.0, "max_token": 3.0})


async def test_the_responses_say_what_they_were_sampled_with(serve: Serve) -> None:
    served = await serve(model_of(**QWEN))
    found = (await served.post("/v1/responses", CALLS["responses"][1])).json()
    assert (found["temperature"], found["top_p"]) == (0.7, 0.8)


async def test_servers_say_what_is_in_force(serve: Serve) -> None:
    served = await serve(model_of(**QWEN))
    expected = {
        "default_sampling": QWEN,
        "default_sampling_from": dict.fromkeys(QWEN, FILE),
    }
    assert (await served.get("/get_model_info")).json().items() >= expected.items()
    (card,) = (await served.get("/v1/models")).json()["data"]
    assert card.items() >= expected.items()
    lines = (await served.post("/api/show", {"model": "fake"})).json()["parameters"].splitlines()
    assert dict(line.split() for line in lines) == {
        "temperature": "0.7",
        "top_p": "0.8",
        "top_k": "20",
        "repeat_penalty": "1.05",
    }


# ---------------------------------------------------------------- programs


async def test_programs(client: MakeClient) -> None:
    c = client()
    c.model.model_info = msgspec.structs.replace(
        c.model.model_info, sampling={**QWEN, "max_tokens": 3}
    )
    asked = (
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=5, temperature=1.0, top_k=-1, given=("temperature", "top_k")),
        SamplingParams(max_tokens=5, temperature=0.2, top_p=0),
    )
    c.send(Open(1, 1), Append(2, 1, text("Once")))
    c.send(*(Generate(3 + index, 1, params=params) for index, params in enumerate(asked)))
    await c.result(5)
    plain, named, greedy = (request.params for request in c.engine.submitted)
    assert drawn(plain) == {key: QWEN[key] for key in NEUTRAL}
    assert plain.max_tokens == 5  # programs have a default of their own
    assert plain.repetition_penalty == named.repetition_penalty == 1.05
    assert drawn(named) == {"temperature": 1.0, "top_p": 0.8, "top_k": -1}
    assert drawn(greedy) == {"temperature": 0.0, "top_p": 1.0, "top_k": 20}
    assert not any(params.given for params in (plain, named, greedy))


async def test_a_stop_token_that_cannot_come_is_told_and_left_out(served: Served) -> None:
    """sglang's clients send ids of other vocabularies; one below 0 is a fault."""
    size = served.model.model_info.vocab_size
    for stops, status in (([3, size], 200), ([-1], 400)):
        body = {"prompt": "x", "stop_token_ids": stops}
        async with served.http.post("/v1/completions", json=body) as reply:
            assert reply.status == status
            assert status == 400 or str(size) in reply.headers["X-Rootlace-Warning"]
    assert served.model.last_generate.params.stop_token_ids == (3,)
