"""A GGUF file is served like the model folder from which it was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import rootlace as rl
from rootlace.cli.app import app
from tests.cli.test_doctor import make_quick
from tests.conftest import ROOT
from tests.model.gguf.converting import convert
from tests.tiny_model import make_tiny_model

STORIES = ROOT.parent / "shared" / "data" / "models" / "stories3M"


@rl.function
def program(s: rl.State, start: str) -> None:
    s += start + rl.gen("text", max_tokens=24, temperature=0)
    s += rl.gen("number", regex="[0-9]{3}", temperature=0)
    s += rl.user("Hi <|end|>") + rl.assistant(rl.gen("answer", max_tokens=8, temperature=0))


def answers(model: Path) -> list[object]:
    with rl.Runtime(str(model), dtype="float32", num_blocks=64, threads=1) as runtime:
        found = program.run(start="Once upon a time", backend=runtime)
        return [found[name] for name in ("text", "number", "answer")] + [found.text()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_programs_find_the_same(tiny: Path, tmp_path: Path) -> None:
    """Compares a trained model, if there is one."""
    model = STORIES if STORIES.is_dir() else tiny
    found = answers(convert(model, tmp_path / "m.gguf"))
    assert found == answers(model)
    assert model == tiny or "little" in str(found[0])


def test_a_quantised_file(tiny: Path, tmp_path: Path) -> None:
    text, number, _, _ = answers(convert(tiny, tmp_path / "m.gguf", "Q4_0"))
    assert text and str(number).isdigit()


def test_the_doctor(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)
    path = convert(tiny, tmp_path / "m.gguf", "Q8_0")
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json", str(path)])
    assert result.exit_code == 0, result.output
    model = json.loads(result.output)["model"]
    assert model["path"] == str(path) and model["context_length"] == 512


def test_refusals_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\1\0\0\0")
    result = CliRunner().invoke(app, ["serve", str(path)])
    assert result.exit_code != 0
    assert "GGUF version 1 is not supported" in result.output.replace("\n", " ")
