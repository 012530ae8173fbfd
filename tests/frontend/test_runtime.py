"""Starting a runtime, and the offline engine, with a process that only speaks the protocol."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rootlace as rl
from rootlace.client import runtime as gateway_process
from rootlace.client import runtime as runtime_module
from rootlace.runtime.config import RuntimeConfig, runtime_config, settings
from rootlace.wire.errors import InvalidRequest, ServerUnavailable
from tests.processes import alive
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fake_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_process, "GATEWAY_MODULE", "tests.frontend.fake_process")
    monkeypatch.chdir(ROOT)


@rl.function
def program(s):
    s += "a" + rl.gen("x")


@pytest.mark.parametrize("started", [rl.Runtime, rl.Engine])
def test_help_lists_the_options(started: Any) -> None:
    shown = inspect.signature(started).parameters
    for setting in settings(RuntimeConfig):
        assert shown[setting.keyword].default == setting.default
    inspect.signature(started).bind("m", page_size=4)  # sglang's names work, too


def test_every_shown_default_may_be_given() -> None:
    plain = runtime_config("m", "ipc://x", {})
    for setting in settings(RuntimeConfig):
        shown = inspect.signature(rl.Runtime).parameters[setting.keyword]
        given = runtime_config("m", "ipc://x", {setting.keyword: shown.default})
        assert msgspec.convert(given, RuntimeConfig) == msgspec.convert(plain, RuntimeConfig)
        if setting.keyword != "warm_up":  # `warm_up` may also be an expression
            msgspec.convert(shown.default, shown.annotation)


def test_options_reach_the_configuration(tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    with rl.Runtime(
        "m",
        served_model_name=str(seen),
        block_size=4,
        policy="fcfs",
        disable_radix_cache=True,
        dtype="float32",
        api_key="k",
        constraint_backend="llguidance",
        jump_forward=False,
        kv_cache_dtype="fp8_e4m3",
        kernels="reference",
        disable_cuda_graph=True,
        overlap=False,
    ) as runtime:
        config = json.loads(seen.read_text())
        assert config["gateway"]["api_key"] == "k"
        assert config["engine"] == {
            "executor": {
                "model": "m",
                "dtype": "float32",
                "kv_dtype": "fp8_e4m3",
                "kernels": "reference",
                "cuda_graphs": False,
            },
            "cache": {"block_size": 4, "enabled": False},
            "scheduler": {"policy": "fcfs"},
            "constraints": {"backend": "llguidance", "jump_forward": False},
            "overlap": False,
        }
        assert program.run(backend=runtime)["x"]
        assert runtime.model_name == "fake"
        pid = runtime.pid
        assert alive(pid)
    assert not alive(pid)
    runtime.shutdown()  # a second call does no harm
    with pytest.raises(ServerUnavailable):
        program.run(backend=runtime)


def test_close_ends_the_runtime_and_a_block_closes_an_endpoint(tmp_path: Path) -> None:
    runtime = rl.Runtime("m", served_name=str(tmp_path / "seen"))
    pid = runtime.pid
    with rl.RuntimeEndpoint(runtime.program_address) as endpoint:
        assert program.run(backend=endpoint)["x"]
        connection = endpoint.connect()
    assert connection.lost is not None and alive(pid)
    runtime.close()
    assert not alive(pid)


def test_every_keyword_has_its_place() -> None:
    """Keywords include sglang's names, some of which have the reverse meaning."""
    named_alike = {
        "gateway": (
            "allowed_hosts api_key cache_reports client_timeout cors_origins default_sampling "
            "disaggregate disaggregate_by disaggregate_from disaggregate_gb drain_seconds files "
            "generation_config hold_seconds host http_port idle_unload keys_file load "
            "max_body_bytes max_branches max_connections max_http_connections max_receiving_bytes "
            "otlp program_address program_key replicas served_name state stream_interval tools "
            "warm_up"
        ),
        "engine.executor": (
            "adapters allow_pickle context_length cuda_graphs device dtype ignore_config_keys "
            "kernels kv_dtype kv_memory_bytes quantize reference_for "
            "tensor_parallel threads weight_cache weight_cache_bytes"
        ),
        "engine.cache": "block_size eviction max_pinned num_blocks",
        "engine.scheduler": (
            "check_invariants max_delay max_overtaken max_running max_step_tokens max_waiting "
            "policy priority_seconds speculation_tokens step_seconds stream_rate"
        ),
        "engine.constraints": "jump_forward",
        "engine": "overlap",
        "engine.logs": "log_format log_level",
    }
    places = {
        "served_model_name": "gateway.served_name",
        "port": "gateway.http_port",
        "kv_cache_dtype": "engine.executor.kv_dtype",
        "lora_paths": "engine.executor.adapters",
        "disable_cuda_graph": "not engine.executor.cuda_graphs",
        "page_size": "engine.cache.block_size",
        "cache": "engine.cache.enabled",
        "disable_radix_cache": "not engine.cache.enabled",
        "schedule_policy": "engine.scheduler.policy",
        "chunked_prefill_size": "engine.scheduler.max_step_tokens",
        "max_running_requests": "engine.scheduler.max_running",
        "tp_size": "engine.executor.tensor_parallel",
        "draft_model": "engine.executor.draft_model",
        "speculative_draft_model_path": "engine.executor.draft_model",
        "cache_host_gb": "engine.cache.host_gb",
        "cache_disk": "engine.cache.disk",
        "cache_disk_gb": "engine.cache.disk_gb",
        "cache_disk_hourly_gb": "engine.cache.disk_hourly_gb",
        "constraint_backend": "engine.constraints.backend",
        "grammar_backend": "engine.constraints.backend",
    }
    for part, names in named_alike.items():
        places |= {name: f"{part}.{name}" for name in names.split()}
    known = {name: setting for setting in settings(RuntimeConfig) for name in setting.names}
    assert known.keys() == places.keys()
    for keyword, place in places.items():
        setting = known[keyword]
        value = True if setting.type is bool else "x" if setting.required else setting.default
        found: Any = runtime_config("m", "ipc://x", {keyword: value})
        opposite, _, path = place.rpartition(" ")
        for part in path.split("."):
            found = found[part]
        assert found == (not value if opposite else value), keyword
    named = runtime_config("m", "ipc://x", {"adapters": {"a": "x", "b": "y=z"}})
    assert named["engine"]["executor"]["adapters"] == ["a=x", "b=y=z"]


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"blok_size.*did you mean 'block_size'"):
        rl.Runtime("m", blok_size=3)
    with pytest.raises(TypeError, match="once"):
        rl.Runtime("a", model_path="b")


def test_without_a_model_it_is_the_embedded_one(
    monkeypatch: pytest.MonkeyPatch, demo_model: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def launch(config: dict[str, Any], *rest: object) -> None:
        asked.append(config)
        raise ServerUnavailable("seen enough")

    monkeypatch.setattr(runtime_module, "GatewayProcess", launch)
    with pytest.raises(ServerUnavailable):
        rl.Runtime()
    assert Path(asked[0]["gateway"]["model"]) == demo_model


@pytest.mark.slow
def test_a_runtime_that_does_not_start() -> None:
    with pytest.raises(ServerUnavailable, match=r"status 3(.|\n)*loading crash"):
        rl.Runtime("crash")
    with pytest.raises(InvalidRequest, match=r"no model there(.|\n)*loading refuse"):
        rl.Runtime("refuse")
    with pytest.raises(ServerUnavailable, match="not ready after"):
        rl.Runtime("hang", launch_timeout=0.5)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_connects_for_itself(tmp_path: Path) -> None:
    with rl.Runtime("m", served_model_name=str(tmp_path / "seen.json")) as runtime:
        expected = program.run(backend=runtime)["x"]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = int(program.run(backend=runtime)["x"] != expected)
                runtime.shutdown()  # as at the end of a process that does not own the runtime
            finally:
                os._exit(status)
        ended: list[int] = []
        try:
            eventually(lambda: ended.extend(os.waitpid(child, os.WNOHANG)) or ended[-2] == child)
        finally:
            if child not in ended:
                os.kill(child, signal.SIGKILL)
        assert ended[-1] == 0
        assert program.run(backend=runtime)["x"] == expected
        assert runtime._folder.exists()


@pytest.mark.slow
def test_a_stubborn_runtime_is_killed(tmp_path: Path) -> None:
    runtime = rl.Runtime("stubborn", served_name=str(tmp_path / "seen"))
    runtime.shutdown(grace=0.1)
    assert not alive(runtime.pid)


@pytest.mark.parametrize("how", ["pass", "os._exit(1)", "os.kill(os.getpid(), 9)", "1 / 0"])
def test_it_ends_with_its_parent(tmp_path: Path, how: str) -> None:
    script = (
        "import os\n"
        "import rootlace as rl\n"
        "from rootlace.client import runtime\n"
        "runtime.GATEWAY_MODULE = 'tests.frontend.fake_process'\n"
        f"r = rl.Runtime('m', served_name={str(tmp_path / 'seen')!r})\n"
        "print(r.pid, flush=True)\n"
        f"{how}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    pid = int(done.stdout)
    eventually(lambda: not alive(pid))


# ---------------------------------------------------------------- the engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[rl.Engine]:
    with rl.Engine(model_path="m", served_name=str(tmp_path / "seen")) as started:
        yield started


def test_generate(engine: rl.Engine) -> None:
    reply = engine.generate("Hello", {"max_new_tokens": 4, "temperature": 0})
    assert set(reply) == {"text", "output_ids", "meta_info"}
    assert len(reply["text"]) == 4 and reply["output_ids"] == [0, 1, 2, 3]
    assert reply["meta_info"]["finish_reason"]["type"] == "length"
    assert reply["meta_info"]["prompt_tokens"] == len("Hello")

    replies = engine.generate(["a", "b"], [{"max_new_tokens": 2}, {"max_new_tokens": 3}])
    assert [len(reply["text"]) for reply in replies] == [2, 3]
    assert len(engine.generate("a", {"n": 3})) == 3
    assert engine.generate(input_ids=[1, 2])["text"] == engine.generate("[1][2]")["text"]
    assert len(engine.generate(input_ids=[[1, 2], [3]])) == 2
    assert engine.generate("a", return_logprob=True)["meta_info"]["output_token_logprobs"]
    # The engine is a backend, too.
    assert program.run(backend=engine)["x"]


def test_streams_are_cumulative(engine: rl.Engine) -> None:
    whole = engine.generate("a")["text"]
    texts = [reply["text"] for reply in engine.generate("a", stream=True)]
    assert texts[-1] == whole and len(texts) > 2
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    indexed = [reply["index"] for reply in engine.generate(["a", "b"], stream=True)]
    assert indexed == sorted(indexed) and set(indexed) == {0, 1}


def test_streams_lose_no_sample_and_no_token(engine: rl.Engine) -> None:
    last = {}
    for reply in engine.generate(["a", "b"], {"n": 3, "max_new_tokens": 7}, stream=True):
        last[reply["index"]] = reply
        assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] > 0
    whole = engine.generate(["a", "b"], {"n": 3, "max_new_tokens": 7})
    assert [last[i]["text"] for i in range(6)] == [reply["text"] for reply in whole]


def test_log_probabilities_that_were_asked_for_are_there(engine: rl.Engine) -> None:
    params = {"max_new_tokens": 0}
    info = engine.generate("a", params, return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert (info["output_token_logprobs"], info["output_top_logprobs"]) == ([], [])
    assert "output_token_logprobs" not in engine.generate("a", params)["meta_info"]


async def test_what_fails_takes_its_company_along(engine: rl.Engine) -> None:
    """The other prompts of a failed call are cancelled, and no branch stays open."""
    for wrong, error in (([2**70], rl.ProgramError), ([-1], InvalidRequest)):
        with pytest.raises(error):
            engine.generate(input_ids=[[1], wrong])
        with pytest.raises(error):
            await engine.async_generate(input_ids=[[1], wrong])
    stream = engine.generate(["a"] * 3, stream=True)
    next(stream)
    stream.close()
    eventually(lambda: engine.get_server_info()["branches"] == 0)


async def test_async_generate(engine: rl.Engine) -> None:
    replies = await asyncio.gather(*[engine.async_generate(str(i)) for i in range(50)])
    assert [reply["text"] for reply in replies] == [
        reply["text"] for reply in engine.generate([str(i) for i in range(50)])
    ]
    stream = await engine.async_generate("a", stream=True)
    texts = [reply["text"] async for reply in stream]
    assert texts[-1] == engine.generate("a")["text"]
    last = {}
    async for reply in await engine.async_generate(["a", "b"], stream=True):
        last[reply["index"]] = reply["text"]
    assert [last[0], last[1]] == [reply["text"] for reply in engine.generate(["a", "b"])]
    eventually(lambda: engine.get_server_info()["branches"] == 0)


def test_wrong_requests(engine: rl.Engine) -> None:
    with pytest.raises(TypeError, match="either prompt or input_ids"):
        engine.generate()
    with pytest.raises(TypeError, match="max_new_token'"):
        engine.generate("a", {"max_new_token": 3})
    with pytest.raises(InvalidRequest, match="temperature"):
        engine.generate("a", {"temperature": -1})
    with pytest.raises(InvalidRequest, match="2 prompts"):
        engine.generate(["a", "b"], [{}])
    with pytest.raises(InvalidRequest, match="token ids"):
        engine.generate(input_ids=[[1, "x"]])  # type: ignore[list-item]


async def test_an_event_loop_goes_on_while_a_runtime_starts(tmp_path: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.ensure_future(tick())
    async with await rl.Runtime.start(
        "m", served_name=str(tmp_path / "seen"), warm_up=rl.gen(regex="a+")
    ) as runtime:
        assert ticks > 10
        assert program.run(backend=runtime)["x"]
        # The program's branch is closed, and so is the branch that warmed up.
        eventually(lambda: runtime.get_server_info()["branches"] == 0)
    ticking.cancel()
    assert not alive(runtime.pid)
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocksize'"):
        await rl.Runtime.start("m", blocksize=4)
    for wrong, error in (
        ({"dtype": "fp16"}, r"dtype: .*'fp16' \(there are 'auto', 'float32', 'bfloat16'\)"),
        ({"kv_memory_bytes": "4G"}, "kv_memory_bytes: Expected `int"),
        ({"threads": 0}, "threads: Expected `int` >= 1"),
    ):
        with pytest.raises(InvalidRequest, match=error):
            rl.Runtime("m", **wrong)


async def test_a_start_that_is_cancelled_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopped: list[rl.Runtime] = []
    stop = rl.Runtime.shutdown
    monkeypatch.setattr(rl.Runtime, "shutdown", lambda self: (stop(self), stopped.append(self)))
    starting = asyncio.ensure_future(rl.Runtime.start("m", served_name=str(tmp_path / "seen")))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    eventually(lambda: len(stopped) == 1)
    assert not alive(stopped[0].pid)


def test_warming_up_with_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="warm_up takes"):
        rl.Runtime("m", warm_up=rl.user("x"))
