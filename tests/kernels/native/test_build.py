"""Compiling at first use: what goes wrong is said, and two at once do not disturb each other."""

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rootlace.kernels.native import build, library
from rootlace.kernels.native.__main__ import main
from rootlace.kernels.native.build import COMPILERS, NativeUnavailable, library_file
from rootlace.kernels.native.library import open_library

HAVE_COMPILER = any(shutil.which(name) for name in COMPILERS)
EXPORTED = '__attribute__((visibility("default")))'
"""Attribute of exported functions, as in `RL_API` of api.h; others are hidden."""
needs_compiler = pytest.mark.skipif(not HAVE_COMPILER, reason="needs a C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two files that are compiled quickly."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "answer.h").write_text("int half();\n")
    (folder / "half.cpp").write_text('#include "answer.h"\nint half() { return 21; }\n')
    (folder / "answer.cpp").write_text(
        f'#include "answer.h"\nextern "C" {EXPORTED} int answer() {{ return 2 * half(); }}\n'
    )
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "native"


def program(folder: Path, name: str, script: str) -> str:
    """A command of that name on its own path."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def compiler(folder: Path, compile: str) -> str:
    """Write a compiler that reports its version and knows this processor, but compiles
    differently."""
    known = "*--version*) echo 1.0;; *-fsyntax-only*) ;;"
    return program(folder, "compiler", f'case "$*" in {known} *) {compile};; esac')


def answer(path: Path) -> int:
    found: int = ctypes.CDLL(str(path)).answer()
    return found


@needs_compiler
def test_it_is_compiled_once(sources: Path, cache: Path) -> None:
    told: list[str] = []
    with library_file(cache, report=told.append, sources=sources) as path:
        assert answer(path) == 42
        assert path.parent == cache
    with library_file(cache, report=told.append, sources=sources) as again:
        assert again == path
    assert told == ["compiling native kernels"]
    assert list(cache.iterdir()) == [path]


@needs_compiler
def test_what_nobody_uses_is_removed(sources: Path, cache: Path) -> None:
    long_ago = time.time() - build.KEPT_SECONDS - 3600
    with library_file(cache, sources=sources) as used:
        pass
    unused, left, foreign = (cache / name for name in ("old.so", "new-killed", "notes.txt"))
    for path in (unused, left, foreign):
        path.touch()
    for path in (used, unused, left, foreign):
        os.utime(path, (long_ago, long_ago))
    with library_file(cache, sources=sources) as again:
        assert again == used
    assert unused.exists()  # nothing was compiled
    (sources / "more.h").touch()
    with library_file(cache, sources=sources) as another:
        assert another != used
    assert set(cache.iterdir()) == {used, another, foreign}


@needs_compiler
def test_sources_headers_and_flags_make_another_library(sources: Path, cache: Path) -> None:
    paths = []
    for name in ("half.cpp", "answer.h", "more.h"):
        with library_file(cache, sources=sources) as path:
            paths.append(path)
        with (sources / name).open("a") as file:
            file.write("// another\n")
    with library_file(cache, target=["-O1"], sources=sources) as path:
        paths.append(path)
    assert len(set(paths)) == 4


@needs_compiler
def test_a_library_made_before_serves_without_a_compiler(sources: Path, cache: Path) -> None:
    with library_file(cache, sources=sources) as path:
        pass
    with library_file(cache, compilers=["no-such-compiler"], sources=sources) as found:
        assert found == path


def test_no_compiler(sources: Path, cache: Path) -> None:
    with (
        pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler was found \(none, nil\)"),
        library_file(cache, compilers=["none", "nil"], sources=sources),
    ):
        pass


def test_a_compiler_that_does_not_run(sources: Path, cache: Path, tmp_path: Path) -> None:
    broken = program(tmp_path / "bin", "broken", "exit 1")
    with (
        pytest.raises(NativeUnavailable, match="no C"),
        library_file(cache, compilers=[broken], sources=sources),
    ):
        pass


def test_a_compiler_that_fails(sources: Path, cache: Path, tmp_path: Path) -> None:
    broken = compiler(tmp_path / "bin", "echo out of luck >&2; exit 3")
    with (
        pytest.raises(NativeUnavailable, match="out of luck"),
        library_file(cache, compilers=[broken], sources=sources),
    ):
        pass
    assert not cache.exists() or not list(cache.iterdir())


@needs_compiler
def test_the_next_compiler_is_tried(sources: Path, cache: Path, tmp_path: Path) -> None:
    broken = compiler(tmp_path / "bin", "exit 3")
    with library_file(cache, compilers=[broken, *COMPILERS], sources=sources) as path:
        assert answer(path) == 42


@needs_compiler
def test_an_error_in_the_sources(sources: Path, cache: Path) -> None:
    (sources / "half.cpp").write_text("int half() { return nothing; }\n")
    with (
        pytest.raises(NativeUnavailable, match="nothing"),
        library_file(cache, sources=sources),
    ):
        pass


def test_a_compiler_that_hangs(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.2)
    slow = compiler(tmp_path / "bin", "exec sleep 60")
    with (
        pytest.raises(NativeUnavailable, match="timed out"),
        library_file(cache, compilers=[slow], sources=sources),
    ):
        pass


@needs_compiler
def test_a_cache_that_cannot_be_written(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with (
        caplog.at_level(logging.WARNING),
        library_file(tmp_path / "file" / "native", sources=sources) as path,
    ):
        loaded = ctypes.CDLL(str(path))
    assert not path.exists()
    assert loaded.answer() == 42  # it stays where it is loaded
    assert "compiled at every start" in caplog.text


@pytest.mark.slow
@needs_compiler
def test_processes_at_once(sources: Path, cache: Path) -> None:
    script = f"""
import ctypes, sys
from pathlib import Path
sys.path.insert(0, {str(Path(build.__file__).parent)!r})
from build import library_file
with library_file(Path({str(cache)!r}), sources=Path({str(sources)!r})) as path:
    assert ctypes.CDLL(str(path)).answer() == 42
"""
    running = [
        subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(2)
    ]
    for process in running:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said.decode()
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_what_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "native.so"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        open_library(str(path))


def test_where_libraries_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.default_cache() == tmp_path / "rootlace" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.default_cache() == tmp_path / "home" / ".cache" / "rootlace" / "native"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert build.default_cache() == Path("/.cache/rootlace/native")


@pytest.fixture
def own_sources(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `library.load` compile `sources` into `cache`; they have the functions that it
    expects."""
    defined = ("rl_prepare", "rl_sizes")
    empty = (name for name in library.FUNCTIONS if name not in defined)
    bodies = "\n".join(f"{EXPORTED} void {name}() {{}}" for name in empty)
    sizes = ", ".join(str(ctypes.sizeof(one)) for one in library.STRUCTURES)
    count = len(library.STRUCTURES)
    (sources / "all.cpp").write_text(
        f"""extern "C" {{ {bodies}
{EXPORTED} int rl_prepare() {{ return 0; }}
{EXPORTED} void rl_sizes(long long* sizes) {{
  const long long all[] = {{{sizes}}};
  for (int i = 0; i < {count}; i++) sizes[i] = all[i];
}} }}"""
    )
    monkeypatch.setattr(
        library, "library_file", functools.partial(library_file, cache, sources=sources)
    )


@needs_compiler
@pytest.mark.usefixtures("own_sources")
def test_a_refused_tile_unit_is_done_without(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = (sources / "all.cpp").read_text()
    refusal = f"#ifdef HAS_TILES\n{EXPORTED} int rl_prepare() {{ return 1; }}\n#else\n"
    allowed = f"{EXPORTED} int rl_prepare() {{ return 0; }}\n"
    text = text.replace(allowed, f"{refusal}{allowed}#endif\n")
    (sources / "all.cpp").write_text(text)
    monkeypatch.setitem(library.INSTRUCTIONS, "best", ("-DHAS_TILES",))
    monkeypatch.setitem(library.INSTRUCTIONS, "no-tiles", ())
    library.load()
    assert "computing without the tile unit: the system refuses it" in caplog.text
    monkeypatch.setitem(library.INSTRUCTIONS, "tiles", ("-DHAS_TILES",))
    with pytest.raises(library.InstructionsRefused):
        library.load(instructions="tiles")


@needs_compiler
@pytest.mark.usefixtures("own_sources")
def test_a_damaged_library_is_compiled_again(cache: Path) -> None:
    told: list[str] = []
    with library.library_file(report=told.append) as path:
        path.write_bytes(path.read_bytes()[:100])
    for _ in range(2):
        library.load(told.append)
        assert list(cache.iterdir()) == [path]
    assert len(told) == 2


@needs_compiler
@pytest.mark.usefixtures("own_sources")
def test_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder(*_: object, **__: object) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", no_folder)
    with pytest.raises(NativeUnavailable, match="No usable temporary directory"):
        library.load()


@needs_compiler
@pytest.mark.usefixtures("own_sources")
def test_compiling_by_hand(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert len(list(cache.iterdir())) == 1
    assert capsys.readouterr().out == "compiling native kernels ...\nnative kernels: ready\n"
    assert main() == 0
    assert capsys.readouterr().out == "native kernels: ready\n"


@pytest.mark.usefixtures("own_sources")
def test_compiling_by_hand_without_a_compiler(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = functools.partial(library_file, cache, compilers=["none"], sources=sources)
    monkeypatch.setattr(library, "library_file", without)
    assert main() == 1
    assert capsys.readouterr().err == "no native kernels: no C++ compiler was found (none)\n"


@needs_compiler
def test_a_library_without_the_functions(sources: Path, cache: Path) -> None:
    with (
        library_file(cache, sources=sources) as path,
        pytest.raises(NativeUnavailable, match="have no rl_error"),
    ):
        open_library(str(path))
