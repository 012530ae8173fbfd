"""`rootlace chat`, against a served tiny model, and what the command line shows of itself."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import pytest
from click.testing import CliRunner

import rootlace as rl
from rootlace.cli.app import app
from rootlace.cli.run import Conversation
from rootlace.program import branch
from tests.cli.conftest import Serve

GREEDY = ["--temperature", "0", "--max-tokens", "6"]


def test_a_conversation(served: Serve) -> None:
    typed = "one\n\ntwo\n/stats\n/reset\nthree\n/stats\n/quit\nnever\n"
    result = CliRunner().invoke(
        app, ["chat", "--url", served.url, "--system", "be", *GREEDY], input=typed
    )
    assert result.exit_code == 0, result.output
    turns = re.findall(
        r"\[prompt (\d+) tokens: (\d+) cached, (\d+) computed; reply (\d+)\]", result.output
    )
    first, second, third = ([int(n) for n in turn] for turn in turns)
    for prompt, cached, computed, _ in (first, second, third):
        assert prompt == cached + computed
    # The second turn finds everything before it in the cache, to the last generated token but
    # one (whose key and value no step has computed yet); only the new message is computed.
    assert second[1] >= first[0] + first[3] - 1
    assert second[2] <= len("<end>two<end><user><assistant>")
    assert third[0] == first[0] + len("three") - len("one")  # after /reset
    assert re.search(rf"2 +{second[0]} +{second[1]} +{second[2]} +{second[3]}", result.output)


def test_the_end_of_the_input_ends_it(served: Serve) -> None:
    result = CliRunner().invoke(app, ["chat", "--url", served.url], input="")
    assert result.exit_code == 0


def test_a_turn_that_fails_is_forgotten(served: Serve) -> None:
    typed = "one\n" + "x" * 2000 + "\ntwo\n"
    result = CliRunner().invoke(app, ["chat", "--url", served.url, *GREEDY], input=typed)
    assert result.exit_code == 0, result.output
    assert "context length" in result.output
    assert len(re.findall(r"\[prompt \d+ tokens", result.output)) == 2


def test_an_interrupted_turn_is_forgotten(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(event: object) -> None:
        raise KeyboardInterrupt

    backend = rl.RuntimeEndpoint(served.url)
    conversation = Conversation(backend, "", temperature=0.0, max_tokens=200)
    whole = "".join(conversation.ask("hi"))
    conversation.reset()
    reply = conversation.ask("hi")
    next(reply)
    reply.close()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(branch, "wait_for_event", pressed)
        list(conversation.ask("hi"))
    assert conversation.turns == []
    assert "".join(conversation.ask("hi")) == whole
    conversation.close()
    backend.close()


def test_a_temperature_where_the_model_has_none(served: Serve) -> None:
    """(One that has its own: e2e/test_sampling_defaults.py.)"""
    backend = rl.RuntimeEndpoint(served.url)
    conversation = Conversation(backend, "", None, max_tokens=30)
    assert conversation._run.defaults["temperature"] == 0.7
    conversation.close()
    backend.close()


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"rootlace {metadata.version('rootlace')}\n")


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in ("serve", "run", "chat", "--version"))
    assert CliRunner().invoke(app, []).exit_code == 2


def test_a_shell_completes_commands_and_options() -> None:
    for words, place, completed in (
        ("rootlace ser", 1, "serve"),
        ("rootlace serve --ev", 2, "--eviction"),
    ):
        asked = {
            "_ROOTLACE_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(place),
        }
        assert CliRunner().invoke(app, env=asked).output == f"plain,{completed}\n"


def test_help_tells_defaults_that_are_no_values() -> None:
    wide = {"COLUMNS": "200"}
    for command, defaults in {
        "serve": ("demo model", "tcp, port + 1", "the folder's", "by memory", "on a GPU"),
        "run": ("demo model",),
        "chat": ("demo model",),
    }.items():
        found = CliRunner().invoke(app, [command, "--help"], env=wide, terminal_width=200)
        text = " ".join(found.output.split())
        assert all(f"default: ({default})" in text for default in defaults), text


def test_the_command_line_is_light() -> None:
    """Neither the version nor the help needs the runtime's libraries."""
    code = (
        "import sys; from rootlace.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'aiohttp', 'tokenizers', 'jinja2'}\n"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
