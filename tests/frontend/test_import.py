"""Importing the package is cheap: counted in modules, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    "torch", "numpy", "transformers", "tokenizers", "aiohttp", "safetensors", "llguidance",
    "zmq", "rich", "click", "typer", "asyncio", "urllib.request",
}  # fmt: skip


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_brings_nothing_heavy() -> None:
    loaded = modules_after("import rootlace")
    assert not HEAVY & loaded
    assert not [name for name in loaded if name.startswith("rootlace.")]  # names are lazy


def test_writing_a_program_brings_nothing_heavy_either() -> None:
    program = (
        "import rootlace as rl\n"
        "@rl.function\n"
        "def f(s, x):\n"
        "    s += rl.user('hello ' + x) + rl.gen('y', max_tokens=3, regex='a+')\n"
        "f.trace()\n"
    )
    assert not HEAVY & modules_after(program)


def test_help_imports_no_model_and_no_program() -> None:
    loaded = modules_after("from rootlace.cli import app")
    unused = ("language", "program", "client", "runtime.model", "runtime.server", "evaluation")
    assert not [name for name in loaded if name.startswith(tuple(f"rootlace.{n}" for n in unused))]


def test_a_connection_needs_no_part_of_the_runtime() -> None:
    loaded = modules_after("import rootlace as rl\nrl.RuntimeEndpoint")
    assert not [name for name in loaded if name.startswith("rootlace.runtime")]


def test_a_runtime_is_started_from_its_configuration_alone() -> None:
    loaded = modules_after("import rootlace as rl\nrl.Runtime, rl.Engine")
    assert not {"torch", "numpy", "transformers", "aiohttp", "tokenizers"} & loaded
    parts = {name for name in loaded if name.startswith("rootlace.runtime.")}
    assert parts == {"rootlace.runtime.config"}


def test_every_public_name_is_there() -> None:
    import rootlace

    for name in rootlace.__all__:
        assert getattr(rootlace, name) is not None
    assert set(dir(rootlace)) == set(rootlace.__all__)
    assert rootlace.__version__.count(".") == 2
