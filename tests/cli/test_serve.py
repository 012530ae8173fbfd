"""`rootlace serve` as a real process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from click.testing import CliRunner

import rootlace as rl
from rootlace.cli import main
from rootlace.cli.app import app
from rootlace.cli.options import Size
from rootlace.runtime.config import (
    CacheConfig,
    ConstraintConfig,
    EngineConfig,
    ExecutorConfig,
    GatewayConfig,
    LogConfig,
    SchedulerConfig,
)
from tests.cli.conftest import CPU, Serve
from tests.model.eagle_heads import save_head_for
from tests.processes import alive
from tests.waiting import eventually


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as reply:
        return json.load(reply)


def test_it_answers_http_and_programs(served: Serve) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    first = _post(f"{served.url}/generate", body)
    again = _post(f"{served.url}/generate", body)
    # The model ends by chance or by length; the same text comes from a cold and from a warm cache.
    assert again["output_ids"] == first["output_ids"] and len(first["output_ids"]) >= 1
    assert again["meta_info"]["cached_tokens"] == 4 and again["meta_info"]["prompt_tokens"] == 5

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert client.models.list().data[0].id == "tiny"
        stream = client.completions.create(
            model="tiny", prompt="hello", max_tokens=4, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == first["text"]

    @rl.function
    def program(s: Any) -> None:
        s += "hello"
        s += rl.gen("x", max_tokens=4, temperature=0)

    for address in (served.url, served.program_address):
        backend = rl.RuntimeEndpoint(address)
        assert program.run(backend=backend)["x"] == first["text"]
        backend.close()


@pytest.mark.slow
def test_an_api_key_and_a_clean_stop(tiny_model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = ("--served-name", "other", "--api-key-file", key, "--no-cache")
    serve = Serve(tiny_model, "--port", "0", *options, *CPU)
    try:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{serve.url}/v1/models", timeout=240)
        assert urllib.request.urlopen(f"{serve.url}/health", timeout=240).status == 200
        with pytest.raises(rl.RootlaceError):
            rl.RuntimeEndpoint(serve.program_address, api_key="wrong")
        backend = rl.RuntimeEndpoint(serve.url, api_key="secret")
        assert backend.get_model_name() == "other"
        backend.close()
        children = psutil.Process(serve.process.pid).children(recursive=True)
        assert children  # the engine is a process of its own
    finally:
        code = serve.stop(signal.SIGINT)
    assert code == 0 and "Traceback" not in serve.output
    eventually(lambda: not any(alive(child) for child in children))


@pytest.mark.slow
def test_a_kill_leaves_no_process_behind(tiny_model: Path) -> None:
    serve = Serve(tiny_model, "--port", "0", *CPU)
    children = psutil.Process(serve.process.pid).children(recursive=True)
    serve.process.kill()
    serve.process.wait(30)
    eventually(lambda: not any(alive(child) for child in children))


@pytest.mark.slow
def test_a_signal_while_it_loads(tiny_model: Path) -> None:
    command = [sys.executable, "-c", "from rootlace.cli import main; main()", "serve"]
    process = subprocess.Popen(
        [*command, str(tiny_model), "--port", "0", *CPU],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # The engine is there as soon as loading has begun, and takes a second or more for it.
    eventually(lambda: bool(psutil.Process(process.pid).children()))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "Traceback" not in output


# ---------------------------------------------------------------- what cannot be served


def _fails(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.output


def _configured(
    monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[GatewayConfig, EngineConfig]:
    """What `rootlace serve` would start with."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "rootlace.cli.serve._serve_until_signal",
        lambda models, _: seen.append((models[0].gateway, models[0].engine)),
    )
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    (found,) = seen
    return found


def test_without_options_it_is_the_default(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, engine = _configured(monkeypatch, str(tiny_model), "--port", "0")
    folder, address = str(tiny_model.resolve()), "tcp://127.0.0.1:0"
    assert gateway == GatewayConfig(model=folder, program_address=address, http_port=0)
    assert engine == EngineConfig(executor=ExecutorConfig(model=folder))


def test_every_option_reaches_the_configuration(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (
        "--host ::1 --port 0 --program-address ipc:///tmp/x --api-key k --served-name n "
        "--stream-interval 0.5 --drain-seconds 2 --log-level error --log-format json "
        "--dtype float32 --device cpu --threads 3 --context-length 99 "
        "--block-size 4 --kv-memory 1.5M --kv-dtype fp8_e4m3 --kernels reference "
        "--max-step-tokens 5 --max-running 6 --max-waiting 0 --policy dfs --no-cache "
        "--constraint-backend llguidance --no-jump-forward --no-overlap --no-cuda-graphs "
        "--check-invariants --allow-pickle"
    )
    gateway, engine = _configured(monkeypatch, str(tiny_model), *options.split())
    folder = str(tiny_model.resolve())
    assert gateway == GatewayConfig(
        model=folder,
        host="::1",
        http_port=0,
        program_address="ipc:///tmp/x",
        api_key="k",
        served_name="n",
        stream_interval=0.5,
        drain_seconds=2,
    )
    assert engine == EngineConfig(
        executor=ExecutorConfig(
            model=folder,
            dtype="float32",
            device="cpu",
            threads=3,
            context_length=99,
            kv_memory_bytes=3 << 19,
            kv_dtype="fp8_e4m3",
            kernels="reference",
            cuda_graphs=False,
            allow_pickle=True,
        ),
        cache=CacheConfig(block_size=4, enabled=False),
        scheduler=SchedulerConfig(
            max_step_tokens=5, max_running=6, max_waiting=0, policy="dfs", check_invariants=True
        ),
        constraints=ConstraintConfig(backend="llguidance", jump_forward=False),
        overlap=False,
        logs=LogConfig(log_level="error", log_format="json"),
    )
    _, engine = _configured(
        monkeypatch, str(tiny_model), "--port", "0", "--kv-blocks", "7", "--overlap"
    )
    assert engine.cache.num_blocks == 7 and engine.overlap is True


def test_a_draft_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up as the model is, and refused before anything is loaded."""
    options = ("--port", "0", "--draft-model")
    _, engine = _configured(monkeypatch, str(tiny_model), *options, str(tiny_model / "."))
    assert engine.executor.draft_model == str(tiny_model.resolve())
    assert "there is no such folder" in _fails(str(tiny_model), *options, str(tmp_path / "none"))
    said = _fails(str(tiny_model), *options, str(tiny_model), "--tensor-parallel", "2")
    assert f"draft_model {tiny_model.resolve()}: not served with tensor_parallel" in said


def test_a_head(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no tokenizer; what is not read of it is refused before anything is loaded."""
    head = save_head_for(tiny_model, tmp_path / "head")
    options = ("--port", "0", "--draft-model", str(head))
    _, engine = _configured(monkeypatch, str(tiny_model), *options)
    assert engine.executor.draft_model == str(head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    said = _fails(str(tiny_model), *options)
    assert f"draft_model {head}: EAGLE head: {head}/config.json: hidden_size 128: expected" in said


def test_options_of_a_file(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line counts more than the file."""
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"model: {tiny_model}\nport: 0\nkv_memory: 1.5M\npolicy: dfs\nno-cache: true\n"
        "stream-interval: 0.5\nthreads: 3\napi-key: 1234\nadapter: x=/y\neviction: null\n"
    )
    gateway, engine = _configured(monkeypatch, "--config", str(path), "--threads", "2")
    assert (gateway.http_port, gateway.stream_interval, gateway.api_key) == (0, 0.5, "1234")
    assert gateway.model == str(tiny_model.resolve())
    assert engine.executor.kv_memory_bytes == 3 << 19 and engine.executor.threads == 2
    assert engine.scheduler.policy == "dfs" and not engine.cache.enabled
    assert engine.executor.adapters == ("x=/y",)
    path.write_text(
        f"models: {{a: {tiny_model}, b: {tiny_model}}}\nport: 0\n"
        "default-sampling: {temperature: 0.5, 'b:top_k': 3, top_p: 0.9}\n"
    )
    gateway, _ = _configured(monkeypatch, "--config", str(path))
    assert gateway.served_name == "a"
    assert gateway.default_sampling == ("temperature=0.5", "top_p=0.9")
    for text, said in (
        ("prot: 1", "did you mean port?"),
        ("- 1", "must hold options"),
        ("port: 1\na: [", ":2: expected the node content"),
        ("port: 1\npolicy: dfs\nport: 2", f"{path}:3: port: given twice"),
        ("port: 1\n--port: 2", f"{path}:2: --port: given twice"),
        ("models: [a]", "must name several models"),
        ("config: other.yaml", "there is no option 'config'"),
    ):
        path.write_text(text)
        assert said in _fails("--config", str(path))
    assert "cannot be read" in _fails("--config", str(tmp_path / "none"))
    for text in (
        "policy: luck",
        "threads: [1]",
        "port: 1.5",
        "warm-up: 3",
        "no-cache: {a: 1}",
        "no-overlap: x",
        "no-overlap: {a: 1}",
    ):
        path.write_text(text)
        result = CliRunner().invoke(app, ["serve", "--config", str(path)])
        assert result.exit_code == 2 and "Invalid value for '--" in result.output


def test_what_is_wrong_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "c.yaml").write_text("port: 70000")
    no_size = "error: Invalid value for '--kv-memory': {!r} is not a size; write it like 512M or 4G"
    for arguments, status, said in (
        ("serve --prot 1", 2, "error: No such option '--prot'. (Did you mean one of: '--"),
        ("serve --port 70000", 2, "error: Invalid value for '--port'"),
        (f"serve --config {file}", 2, f"error: {file}: Invalid value for '--port'"),
        ("serve --kv-memory much", 2, no_size.format("much")),
        ("serve --kv-memory 0", 2, no_size.format("0")),
        ("top --interval nan", 2, "error: Invalid value for '--interval': 'nan' is not a number"),
        ("bench --load x", 2, "error: Invalid value for '--load': 'x' is not one of 'chat', "),
        ("sevre", 2, "error: No such command 'sevre'"),
        ("--version", 0, ""),
    ):
        monkeypatch.setattr(sys, "argv", ["rootlace", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == status
        told = capsys.readouterr().err
        assert told.startswith(said) and told.count("\n") == bool(said)


def test_an_interrupted_command_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rootlace.cli.serve._serve_until_signal", interrupt)
    monkeypatch.setattr(sys, "argv", ["rootlace", "serve", "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_sampling_of_one_of_several_models(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "rootlace.cli.serve._serve_until_signal", lambda models, _: seen.extend(models)
    )
    options = ("--default-sampling", "top_p=0.9,b:top_k=3", "--default-sampling", "a:temperature=0")
    command = ["serve", f"a={tiny_model}", f"b={tiny_model}", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert [one.gateway.default_sampling for one in seen] == [
        ("top_p=0.9", "temperature=0"),
        ("top_p=0.9", "top_k=3"),
    ]


def test_defaults_of_sampling_are_looked_at_before_a_model_is_loaded(tiny_model: Path) -> None:
    told = _fails(str(tiny_model), "--port", "0", "--default-sampling", "temprature=1")
    assert "did you mean temperature?" in told
    told = _fails(str(tiny_model), "--port", "0", "--default-sampling", "other:top_k=1")
    assert "no parameter 'other:top_k'" in told
    told = _fails(str(tiny_model), "--port", "0", "--generation-config", str(tiny_model))
    assert "is neither auto nor none" in " ".join(told.split())


def test_several_models_have_names(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "rootlace.cli.serve._serve_until_signal", lambda models, _: seen.extend(models)
    )
    options = ("--port", "0", "--load", "on-demand", "--idle-unload", "60")
    command = ["serve", f"a={tiny_model}", f"b={tiny_model}", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert [(one.gateway.served_name, one.gateway.model) for one in seen] == [
        ("a", str(tiny_model.resolve())),
        ("b", str(tiny_model.resolve())),
    ]
    assert (seen[0].gateway.load, seen[0].gateway.idle_unload) == ("on-demand", 60.0)
    for models in ([str(tiny_model)] * 2, [f"a={tiny_model}"] * 2, [f"a={tiny_model}", "=x"]):
        assert "each needs a name of its own" in _fails(*models, "--port", "0")
    assert "only the first" in _fails(f"a={tiny_model}", f"default={tiny_model}", "--port", "0")
    assert "no colon" in _fails(f"a:b={tiny_model}", "--port", "0")


def test_help_groups_options_by_their_part_of_the_configuration() -> None:
    output = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "100"}).output
    panels = [output.index(f"\n{name}:\n") for name in ("Gateway", "Cache", "Scheduler", "Logs")]
    assert panels == sorted(panels)
    assert panels[0] < output.index("--drain-seconds") < panels[1] < output.index("--eviction")


def test_a_taken_port(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = _fails(str(tiny_model), "--port", str(port))
        programs = f"tcp://127.0.0.1:{port}"
        also = _fails(str(tiny_model), "--port", "0", "--program-address", programs)
    assert f"cannot listen on 127.0.0.1:{port}" in output and "--port" in output
    assert f"cannot listen on 127.0.0.1:{port}" in also and "--program-address" in also


def test_a_wrong_folder(tmp_path: Path) -> None:
    assert "no such folder" in _fails(str(tmp_path / "nothing"))
    assert "has no config.json" in _fails(str(tmp_path))
    assert "no such folder" in _fails("nothing")
    (tmp_path / "config.json").write_text('{"model_type": "pelican"}')
    output = _fails(str(tmp_path), "--port", "0")
    assert output.startswith("error: ") and str(tmp_path) in output


def test_wrong_options(tiny_model: Path, tmp_path: Path) -> None:
    model = str(tiny_model)
    assert "given twice" in _fails(model, "--model", model)
    assert "not both" in _fails(model, "--kv-blocks", "3", "--kv-memory", "1G")
    assert "cannot be read" in _fails(model, "--api-key-file", str(tmp_path / "none"))
    assert CliRunner().invoke(app, ["serve", "--port", "70000"]).exit_code == 2
    assert CliRunner().invoke(app, ["serve", "--policy", "luck"]).exit_code == 2
    assert CliRunner().invoke(app, ["serve", "--constraint-backend", "luck"]).exit_code == 2


UNFIT = {
    "--context-length 999999": "context_length 999999 is not between 1 and",
    "--tensor-parallel 5": "is not a multiple of 5",
    "--tensor-parallel 2 --kv-dtype fp8_e4m3": "the scales of kv_dtype fp8_e4m3",
    "--tensor-parallel 2 --cache-disk x": "keep the blocks of a whole model",
}
EACH_UNFIT = """
import sys
from rootlace.cli import main

model, *cases = sys.argv[1:]
for options in cases:
    sys.argv = ["rootlace", "serve", model, "--port", "0", *options.split()]
    try:
        main()
    except SystemExit as ended:
        print(ended.code, "torch" in sys.modules)
"""


def test_options_that_do_not_fit_the_model_are_refused_before_torch_is_imported(
    tiny_model: Path,
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", EACH_UNFIT, str(tiny_model), *UNFIT],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.stdout.splitlines() == ["1 False"] * len(UNFIT), result.stderr
    for line, said in zip(result.stderr.splitlines(), UNFIT.values(), strict=True):
        assert said in line


@pytest.mark.parametrize(
    "text, size", [("1000", 1000), ("512M", 2**29), ("4GiB", 2**32), ("1.5k", 1536)]
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


def test_without_the_runtime(tiny_model: Path, tmp_path: Path) -> None:
    """As in an installation of the light client: aiohttp and torch cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('aiohttp', 'torch', 'numpy', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
    )
    program = tmp_path / "p.py"
    program.write_text("import rootlace as rl\n\n@rl.function\ndef f(s):\n    pass\n")
    for command in (
        ["serve", str(tiny_model), "--port", "0"],
        ["run", f"{program}:f", "--model", str(tiny_model)],
        ["chat", "--model", str(tiny_model)],
    ):
        result = subprocess.run(
            [sys.executable, "-c", "from rootlace.cli import main; main()", *command],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            timeout=240,
            stdin=subprocess.DEVNULL,
        )
        assert result.returncode == 1, result.stdout + result.stderr
        assert "rootlace[runtime]" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("written", "overlap"),
    [
        ("no-overlap: true", False),
        ("no-overlap: 'yes'", False),
        ("no-overlap: false", True),
        ("", None),
    ],
)
def test_a_file_turns_an_option_off(
    written: str,
    overlap: bool | None,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(f"{{{written}}}")
    found = _configured(monkeypatch, str(tiny_model), "--port", "0", "--config", str(file))
    assert found[1].overlap is overlap


def test_a_wrong_number_is_called_one() -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "x"])
    assert "'x' is not a valid integer" in result.output and "range" not in result.output
    result = CliRunner().invoke(app, ["serve", "--drain-seconds", "x"])
    assert "'x' is not a valid number" in result.output
