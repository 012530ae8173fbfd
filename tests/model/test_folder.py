"""Errors for things that are no model folder: their kind, and the remedy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

import rootlace as rl
from rootlace.runtime.model.checkpoint.source import model_folder, servable_folder, servable_source
from rootlace.wire.errors import ServerUnavailable, UnsupportedModel


def touch(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")

    return make


def adapter(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"")
    text = json.dumps({"base_model_name_or_path": "someone/base", "peft_type": "LORA"})
    (folder / "adapter_config.json").write_text(text)


FETCH = ["a pointer of Git LFS", "git lfs pull"]


def pointer(name: str) -> Callable[[Path], None]:
    """Write git's placeholder of a large file that was not fetched."""

    def make(folder: Path) -> None:
        touch("config.json", "tokenizer.json", "model.safetensors")(folder)
        lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{'4d' * 32}", "size 9")
        (folder / name).write_text("\n".join(lines))

    return make


def parts(
    *names: str, there: list[str], pointers: list[str] | None = None
) -> Callable[[Path], None]:
    """Make a folder whose index names these files, some of which exist."""

    def make(folder: Path) -> None:
        for name in pointers or []:
            pointer(name)(folder)
        touch("config.json", "tokenizer.json", *there)(folder)
        (folder / "model.safetensors").unlink(missing_ok=True)
        index = json.dumps({"weight_map": {f"{name}.weight": name for name in names}})
        (folder / "model.safetensors.index.json").write_text(index)

    return make


CASES: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "nothing": (touch(), "nothing", ["nothing: there is no such folder", "Hugging Face hub"]),
    "no user": (touch(), "~nouser/x", ["~nouser/x: it cannot be looked up"]),
    "a long name": (touch(), "x" * 5000, ["it cannot be looked up: File name too long"]),
    "empty": (touch(), ".", ["no config.json"]),
    "path like a hub name": (touch("models/a.txt"), "models/b", ["there is no such folder"]),
    "below the root": (touch(), "/nowhere", ["(a model of the Hugging Face hub is named as in"]),
    "no gguf": (touch(), "no/model.gguf", ["no such file"]),
    "folder of gguf": (touch("model.gguf"), ".", ["no config.json", "GGUF files: model.gguf"]),
    "gguf with config": (touch("a.gguf", "config.json"), ".", ["no safetensors", "a.gguf"]),
    "a file": (touch("model.safetensors"), "model.safetensors", ["a file; name the folder"]),
    "adapter": (adapter, ".", ["LoRA adapter", "adapter_config.json", "someone/base", "merge"]),
    "broken adapter": (touch("adapter_config.json"), ".", ["LoRA adapter", "names it"]),
    "cache": (touch("snapshots/4f2/config.json"), ".", ["Hugging Face cache", "snapshots/4f2"]),
    "no weights": (
        touch("config.json", "tokenizer.json"),
        ".",
        ["no weights", "model.safetensors.index.json"],
    ),
    "bin": (
        touch("config.json", "tokenizer.json", "pytorch_model-00001-of-00002.bin"),
        ".",
        ["pytorch_model-00001-of-00002.bin", "can run code", "save_pretrained", "safetensors"],
    ),
    "another name": (
        touch("config.json", "tokenizer.json", "model-00001-of-00001.safetensors"),
        ".",
        ["no weights", "model-00001-of-00001.safetensors: other names are not read"],
    ),
    "slow tokenizer": (
        touch("config.json", "vocab.json", "model.safetensors"),
        ".",
        ["neither tokenizer.json nor tokenizer.model", "AutoTokenizer.from_pretrained"],
    ),
    "Mistral's tokenizer": (
        touch("config.json", "tekken.json", "model.safetensors"),
        ".",
        ["neither tokenizer.json", "tekken.json is", "PreTrainedTokenizerFast.from_pretrained"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_model_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, given, words = CASES[name]
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        servable_folder(given)
    assert str(caught.value).startswith(f"{given}: ")
    for word in words:
        assert word in str(caught.value)


LACKING: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "a part that is missing": (
        parts("a.safetensors", "b.safetensors", there=["a.safetensors"]),
        ".",
        ["b.safetensors: the file is missing"],
    ),
    "weights to be fetched": (pointer("model.safetensors"), ".", ["model.safetensors: ", *FETCH]),
    "a part to be fetched": (
        parts("a.safetensors", there=[], pointers=["a.safetensors"]),
        ".",
        ["a.safetensors: ", *FETCH],
    ),
    "a tokenizer to be fetched": (pointer("tokenizer.json"), ".", ["tokenizer.json: ", *FETCH]),
    "a gguf file to be fetched": (pointer("m.gguf"), "m.gguf", ["m.gguf: ", *FETCH]),
}


@pytest.mark.parametrize("name", LACKING)
def test_files_that_are_not_there_yet(name: str, tmp_path: Path) -> None:
    make, given, words = LACKING[name]
    make(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        servable_source(tmp_path / given)
    for word in words:
        assert word in str(caught.value)


def test_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts("a.safetensors", there=["a.safetensors"])(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert servable_folder(tmp_path) == tmp_path
    assert servable_folder(f"~/{tmp_path.name}") == tmp_path
    # A merged adapter's folder may still have the adapter's configuration.
    adapter(tmp_path)
    assert servable_folder(str(tmp_path)) == tmp_path
    # Shapes are described without weights.
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "adapter_config.json").unlink()
    assert model_folder(tmp_path) == tmp_path


def test_a_runtime_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ServerUnavailable, match="someone/nothing: it is not in the cache"):
        rl.Runtime("someone/nothing")
