"""Libraries that come with the package: which one is taken, and that it comes before compiling."""

from pathlib import Path

import pytest

from rootlace.kernels.native import library
from rootlace.kernels.native.build import (
    INSTRUCTION_SETS,
    NativeUnavailable,
    Processor,
    library_file,
    prebuilt_library,
    read_processor,
)
from tests.native import native_library

X86 = INSTRUCTION_SETS["x86_64"]
NOTHING = ["no-such-compiler"]


def processor(*names: str) -> Processor:
    has = tuple(one for one in X86 if one.name in names)
    return Processor("", "x86_64", has, tuple(one for one in X86 if one not in has))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for one in X86:
        (tmp_path / f"{one.name}.so").touch()
    return tmp_path


def test_the_best_that_the_processor_has_is_taken(folder: Path) -> None:
    full = read_processor_of(X86[0].flags, folder)
    assert prebuilt_library(full, folder=folder) == folder / "amx.so"
    assert prebuilt_library(full, without=("amx",), folder=folder) == folder / "avx512-bf16.so"
    old = processor("avx2", "generic")
    assert prebuilt_library(old, folder=folder) == folder / "avx2.so"
    (folder / "avx2.so").unlink()
    assert prebuilt_library(old, folder=folder) == folder / "generic.so"


def read_processor_of(flags: frozenset[str], folder: Path) -> Processor:
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text(f"flags : {' '.join(flags)}\n")
    return read_processor(folder, "x86_64")


def test_a_checkout_has_none() -> None:
    assert prebuilt_library(read_processor()) is None


def test_of_another_architecture_there_is_none(folder: Path) -> None:
    assert prebuilt_library(read_processor(folder, "riscv64"), folder=folder) is None


def test_it_is_taken_without_a_compiler_and_before_compiling(folder: Path, tmp_path: Path) -> None:
    brought = folder / "avx2.so"
    told: list[str] = []
    for compilers in (NOTHING, ["g++", "c++"]):
        with library_file(
            tmp_path / "cache", compilers, report=told.append, prebuilt=brought
        ) as path:
            assert path == brought
    assert told == []


def test_a_library_that_was_compiled_here_comes_first(tmp_path: Path) -> None:
    native_library()
    with library_file(prebuilt=tmp_path / "avx2.so") as path:
        assert path.parent != tmp_path


def test_one_that_was_compiled_here_comes_first_whatever_compiler_there_is_now(
    tmp_path: Path,
) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    cache = tmp_path / "cache"
    for name in ("first", "second"):
        make = tmp_path / name
        written = 'for out; do :; done; : > "$out"'
        make.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo $0;; *) {written};; esac\n')
        make.chmod(0o755)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with library_file(cache, [second], target=[], sources=sources) as made:
        pass
    for compilers in (NOTHING, [first, second], [first]):
        with library_file(
            cache, compilers, target=[], sources=sources, prebuilt=tmp_path / "brought.so"
        ) as path:
            assert path == made


def test_one_that_cannot_be_loaded_is_left_and_compiled_instead(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_library()
    broken = folder / "avx2.so"
    monkeypatch.setattr(library, "prebuilt_library", lambda *_: broken)

    compiled = library_file

    def not_cached(prebuilt: Path | None = None, **options: object) -> object:
        """Load a library without earlier compiled ones; compile only if necessary."""
        if prebuilt is None:
            return compiled(**options)
        return compiled(tmp_path / "cache", prebuilt=prebuilt, **options)

    monkeypatch.setattr(library, "library_file", not_cached)
    assert library.load().rl_instructions()
    assert broken.exists()


def test_without_any_the_reason_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(NativeUnavailable, match="no C"),
        library_file(tmp_path, NOTHING, target=["-O1"]),
    ):
        pass
