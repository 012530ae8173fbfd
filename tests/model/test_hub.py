"""Models by their names on the hub, against a stand-in of its interface."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download
from msgspec.structs import replace

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.hub import download
from rootlace.runtime.model.hub.download import HubName, gguf_files, listing_file, snapshots
from rootlace.runtime.model.hub.local import local_model
from rootlace.wire.errors import RootlaceError, ServerUnavailable, UnsupportedModel
from tests.hub_stand_in import Hub, serve_hub
from tests.tiny_model import make_tiny_model

TINY = HubName("people/tiny")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder)
    return folder


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@pytest.fixture
def ours(hub: Hub, tmp_path: Path) -> download.Hub:
    return download.Hub(hub.url, tmp_path / "cache")


def fails(ours: download.Hub, name: HubName, *words: str) -> None:
    with pytest.raises(RootlaceError) as caught:
        ours.fetch(name)
    assert all(word in str(caught.value) for word in (str(name.repo), *words)), caught.value


def test_names() -> None:
    assert HubName.parse("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B")
    name = HubName.parse("a/b_c.d@refs/pr/3:Q4_K_M")
    assert name == HubName("a/b_c.d", "refs/pr/3", "Q4_K_M")
    assert str(name) == "a/b_c.d@refs/pr/3:Q4_K_M"
    for text in ("b", "/a/b", "a/b/c", "a b/c", "~/a", "../b", "a/b@", "a/b:", "a/b c", "a\n/b"):
        assert HubName.parse(text) is None, text


def test_a_model_is_downloaded_once(hub: Hub, ours: download.Hub, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    commit = hub.add(
        TINY.repo, files | {"pytorch_model.bin": b"no", "original/big.safetensors": b"no"}
    )
    folder = ours.fetch(TINY)
    assert folder.name == commit
    read = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    read |= {"chat_template.jinja", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == read & set(files)
    assert all((folder / name).read_bytes() == files[name] for name in read & set(files))
    assert ModelConfig.read(folder).spec == ModelConfig.read(tiny).spec
    hub.asked.clear()
    assert ours.fetch(TINY) == folder
    assert [one for one in hub.asked if "/resolve/" in one] == []


def test_a_tokenizer_of_sentencepiece(hub: Hub, ours: download.Hub, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    del files["tokenizer.json"]
    hub.add(TINY.repo, files | {"tokenizer.model": b"pieces"})
    folder = ours.fetch(TINY)
    assert (folder / "tokenizer.model").read_bytes() == b"pieces"
    hub.status = 503
    assert ours.fetch(TINY) == folder


def test_what_describes_a_model_alone(hub: Hub, ours: download.Hub, tiny: Path) -> None:
    hub.add(TINY.repo, tiny)
    folder = ours.fetch(TINY, weights=False)
    assert (folder / "config.json").is_file() and not hub.sent("model.safetensors")


def test_revisions(hub: Hub, ours: download.Hub, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    old = hub.add(TINY.repo, files, "v1")
    new = hub.add(TINY.repo, files | {"generation_config.json": b'{"eos_token_id": 3}'})
    assert old != new
    for revision, commit in ((None, new), ("main", new), ("v1", old), (old, old)):
        assert ours.fetch(HubName(TINY.repo, revision)).name == commit
    fails(ours, HubName(TINY.repo, "v9"), "no revision v9")


def test_shards(hub: Hub, ours: download.Hub, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    del files["model.safetensors"]
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    files |= dict.fromkeys(index["weight_map"].values(), b"weights")
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), "x.safetensors": b"no"}
    hub.add(TINY.repo, files)
    folder = ours.fetch(TINY)
    shards = {path.name for path in folder.glob("*.safetensors")}
    assert shards == set(index["weight_map"].values())
    hub.add("people/less", {k: v for k, v in files.items() if "2-of-2" not in k})
    fails(ours, HubName("people/less"), "model-2-of-2.safetensors")


@pytest.mark.parametrize("shards", [0, 2])
def test_files_of_torch_where_they_are_allowed(
    hub: Hub, ours: download.Hub, tiny: Path, shards: int
) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    del files["model.safetensors"]
    names = {f"pytorch_model-{i}.bin" for i in range(shards)} or {"pytorch_model.bin"}
    files |= dict.fromkeys(names, b"weights")
    if shards:
        index = json.dumps({"weight_map": {name: name for name in names}}).encode()
        files["pytorch_model.bin.index.json"] = index
    hub.add(TINY.repo, files | {"other.bin": b"no"})
    allowing = replace(ours, allow_pickle=True)
    folder = allowing.fetch(TINY)
    assert {path.name for path in folder.glob("*.bin")} == names
    hub.status = 503
    assert allowing.fetch(TINY) == folder
    fails(ours, TINY, "--allow-pickle")


def test_a_broken_download_goes_on(
    hub: Hub, ours: download.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it ended, to the last whole piece."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add(TINY.repo, tiny)
    hub.cut["model.safetensors"] = 5500
    folder = ours.fetch(TINY)
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    first, second = hub.sent("model.safetensors")
    assert second == f"{first} bytes=5000-"


def test_a_start_that_was_stopped_goes_on(
    hub: Hub, ours: download.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add(TINY.repo, tiny)
    hub.cut["model.safetensors"] = 5500

    def stopped(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(file_download.time, "sleep", stopped)  # before it tries again
        with pytest.raises(KeyboardInterrupt):
            ours.fetch(TINY)
    sizes = [(tiny / name).stat().st_size for name in ("model.safetensors", "tokenizer.json")]
    usage: Any = shutil.disk_usage("/")._replace(free=sum(sizes) - 5000)  # what is there, fits
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    folder = ours.fetch(TINY)
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    first, second = hub.sent("model.safetensors")
    assert second == f"{first} bytes=5000-"
    assert not list(folder.parent.parent.glob("rootlace/*.part"))


def test_a_damaged_file_is_not_kept(hub: Hub, ours: download.Hub, tiny: Path) -> None:
    hub.add(TINY.repo, tiny)
    hub.damaged.add("model.safetensors")
    fails(ours, TINY, "model.safetensors arrived damaged", "sha256")
    hub.damaged.clear()
    folder = ours.fetch(TINY)
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


def test_without_the_hub(hub: Hub, ours: download.Hub, tiny: Path, tmp_path: Path) -> None:
    """The cache is what there is, if it is whole."""
    hub.add(TINY.repo, tiny)
    gone = download.Hub("http://127.0.0.1:9", ours.cache)
    with pytest.raises(ServerUnavailable, match=r"not in the cache, and .* cannot be reached"):
        gone.fetch(TINY)
    described = ours.fetch(TINY, weights=False)
    assert gone.fetch(TINY, weights=False) == described
    with pytest.raises(ServerUnavailable, match=r"its model\.safetensors is not in the cache"):
        gone.fetch(TINY)
    folder = ours.fetch(TINY)
    assert gone.fetch(TINY) == folder
    # What only describes a newer commit does not take its place.
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    hub.add(TINY.repo, files | {"generation_config.json": b"{}"})
    assert ours.fetch(TINY, weights=False) != folder
    assert gone.fetch(TINY) == folder


def test_the_same_is_meant_with_and_without_the_hub(
    hub: Hub, ours: download.Hub, tiny: Path
) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    quants = {f"m-{kind}.gguf": kind.encode() for kind in ("Q4_K_M", "Q8_0")}
    hub.add("people/both", files | quants)
    hub.add("people/quants", quants)
    gone = download.Hub("http://127.0.0.1:9", ours.cache)
    for repo in ("people/both", "people/quants"):
        ours.fetch(HubName(repo, None, "Q8_0"))
        with pytest.raises(ServerUnavailable, match=r"its .* is not in the cache"):
            gone.fetch(HubName(repo))
    folder, file = (ours.fetch(HubName(repo)) for repo in ("people/both", "people/quants"))
    assert (folder / "config.json").is_file() and file.name == "m-Q4_K_M.gguf"
    assert [gone.fetch(HubName(repo)) for repo in ("people/both", "people/quants")] == [
        folder,
        file,
    ]
    # What other tools have put there says less.
    for listing in (ours.cache or Path()).glob("*/rootlace/*.json"):
        listing.unlink()
    assert gone.fetch(HubName("people/quants")) == file
    assert gone.fetch(HubName("people/both")) == folder
    file.unlink()
    with pytest.raises(UnsupportedModel, match="say which"):
        gone.fetch(HubName("people/quants"))


def test_a_check_that_was_cut_short_is_made_up_for(
    hub: Hub, ours: download.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(TINY.repo, tiny)
    hub.damaged.add("model.safetensors")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(download, "_check", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours.fetch(TINY)
    fails(ours, TINY, "model.safetensors arrived damaged")
    hub.damaged.clear()
    folder = ours.fetch(TINY)
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


def test_a_cache_that_is_only_to_be_read(hub: Hub, ours: download.Hub, tiny: Path) -> None:
    hub.add(TINY.repo, tiny)
    folder = ours.fetch(TINY)
    for file in (folder.parent.parent / "refs" / "main", listing_file(folder)):
        file.unlink()
        file.mkdir()
    assert ours.fetch(TINY) == folder


def test_failures_of_the_cache_and_of_tokens_are_told_as_such(
    hub: Hub, ours: download.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(TINY.repo, tiny)

    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.hf_hub_download", full)
        fails(ours, TINY, str(ours.cache), "No space left")
    file = ours.cache or Path()
    file.write_text("")
    fails(ours, TINY, str(file), "Not a directory")
    hub.status = 401
    fails(ours, TINY, "hf auth login")
    hub.status = 503
    with pytest.raises(ServerUnavailable):
        ours.fetch(TINY)


def test_offline(hub: Hub, ours: download.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(TINY.repo, tiny)
    folder = ours.fetch(TINY)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ours.fetch(TINY) == folder
    fails(ours, HubName("people/other"), "HF_HUB_OFFLINE", "not in the cache")
    fails(ours, HubName(TINY.repo, "v1"), "HF_HUB_OFFLINE", "not in the cache")
    assert hub.asked == []


def test_what_cannot_be_had_is_said_before_weights_are_sent(
    hub: Hub, ours: download.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    fails(ours, TINY, "no such folder", "no such model")
    hub.add("people/gated", files)
    hub.gated.add("people/gated")
    fails(ours, HubName("people/gated"), "conditions", "hf auth login")
    hub.add("people/bird", files | {"config.json": b'{"architectures": ["Pelican"]}'})
    with pytest.raises(UnsupportedModel, match="Pelican"):
        ours.fetch(HubName("people/bird"))
    hub.add("people/empty", {"README.md": b"hello"})
    fails(ours, HubName("people/empty"), "no config.json")
    pickled = {k: v for k, v in files.items() if k != "model.safetensors"}
    hub.add("people/pickled", pickled | {"pytorch_model.bin": b"x"})
    fails(ours, HubName("people/pickled"), "pytorch_model.bin", "--allow-pickle")
    slow = {k: v for k, v in files.items() if k != "tokenizer.json"}
    hub.add("people/slow", slow)
    fails(ours, HubName("people/slow"), "no tokenizer.json")
    index = json.dumps({"weight_map": {"a": "../up.safetensors"}}).encode()
    pointing = {k: v for k, v in files.items() if k != "model.safetensors"}
    hub.add("people/up", pointing | {"model.safetensors.index.json": index})
    with pytest.raises(UnsupportedModel, match="bad file name"):
        ours.fetch(HubName("people/up"))
    hub.add("people/large", files)
    usage: Any = shutil.disk_usage("/")._replace(free=10)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage)
        fails(ours, HubName("people/large"), "GB left")
    assert not hub.sent("model.safetensors") and not hub.sent("pytorch_model.bin")


def test_which_gguf_file() -> None:
    files = [f"m-{kind}.gguf" for kind in ("Q4_K_M", "Q4_K_S", "Q8_0", "IQ4_NL", "f16")]
    split = ["big/m-BF16-00001-of-00002.gguf", "big/m-BF16-00002-of-00002.gguf"]
    files += [*split, "mmproj-m-f16.gguf", "README.md"]
    for variant, found in {
        None: ["m-Q4_K_M.gguf"],
        "Q8_0": ["m-Q8_0.gguf"],
        "q4_k_s": ["m-Q4_K_S.gguf"],
        "iq4_nl": ["m-IQ4_NL.gguf"],
        "F16": ["m-f16.gguf"],
        "m-Q8_0.gguf": ["m-Q8_0.gguf"],
        "bf16": split,
    }.items():
        assert gguf_files(HubName("a/b", None, variant), files) == found, variant
    unsloth = ["m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf", "m-i1-Q2_K.gguf"]
    for variant in ("UD-Q4_K_XL", "Q4_K_XL"):
        assert gguf_files(HubName("a/b", None, variant), unsloth) == unsloth[:1]
    assert gguf_files(HubName("a/b", None, "i1-Q2_K"), unsloth) == unsloth[2:]
    with pytest.raises(UnsupportedModel, match="part 1 of 2 is not there"):
        gguf_files(HubName("a/b", None, "BF16"), split[1:])
    with pytest.raises(UnsupportedModel, match=r"no files match.*there are .*IQ4_NL, Q4_K_M"):
        gguf_files(HubName("a/b", None, "Q2_K"), files)
    with pytest.raises(UnsupportedModel, match=r"say which.*F16, Q8_0"):
        gguf_files(HubName("a/b"), ["m-Q8_0.gguf", "m-F16.gguf"])
    with pytest.raises(UnsupportedModel, match="no GGUF file"):
        gguf_files(HubName("a/b", None, "Q8_0"), ["config.json"])
    both = ["config.json", "m-Q8_0.gguf"]
    assert gguf_files(HubName("a/b"), both) == []
    assert gguf_files(HubName("a/b", None, "Q8_0"), both) == ["m-Q8_0.gguf"]
    assert gguf_files(HubName("a/b"), ["model.gguf"]) == ["model.gguf"]


def test_a_gguf_file_is_downloaded(hub: Hub, ours: download.Hub) -> None:
    files = {f"m-{kind}.gguf": kind.encode() for kind in ("Q4_K_M", "Q8_0")}
    hub.add("people/quants", files)
    name = HubName("people/quants", None, "Q8_0")
    path = ours.fetch(name)
    assert path.name == "m-Q8_0.gguf" and path.read_bytes() == b"Q8_0"
    assert not hub.sent("m-Q4_K_M.gguf")
    gone = download.Hub("http://127.0.0.1:9", ours.cache)
    assert gone.fetch(name) == path


def test_a_gguf_file_is_not_downloaded_to_be_described(hub: Hub, ours: download.Hub) -> None:
    hub.add("people/quants", {"m-Q8_0.gguf": b"Q8_0"})
    name = HubName("people/quants", None, "Q8_0")
    with pytest.raises(
        ServerUnavailable, match=r"not in the cache, .*: rootlace serve people/quan"
    ):
        ours.fetch(name, weights=False)
    assert not hub.sent("m-Q8_0.gguf")
    path = ours.fetch(name)
    assert ours.fetch(name, weights=False) == path


def test_what_is_cached(hub: Hub, ours: download.Hub, tiny: Path, tmp_path: Path) -> None:
    assert snapshots(ours.cache) == []
    size = (tiny / "model.safetensors").stat().st_size
    hub.add(TINY.repo, tiny)
    hub.add("people/quants", {"m-Q8_0.gguf": b"12345", "mmproj-f16.gguf": b"1"})
    folder = ours.fetch(TINY)
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    file = ours.fetch(HubName("people/quants", None, "Q8_0"))
    split = {f"m-F16-0000{part}-of-00002.gguf": b"123" for part in (1, 2)}
    hub.add("people/split", split)
    first = ours.fetch(HubName("people/split", None, "F16"))
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    shards = dict.fromkeys(index["weight_map"].values(), b"12")
    files = {path.name: path.read_bytes() for path in tiny.iterdir()} | shards
    del files["model.safetensors"]
    hub.add("people/half", files | {"model.safetensors.index.json": json.dumps(index).encode()})
    half = ours.fetch(HubName("people/half"))
    (half / "model-2-of-2.safetensors").unlink()
    found = [model for snapshot in snapshots(ours.cache) for model in snapshot.models]
    assert found == [
        (HubName("people/quants", None, "m-Q8_0"), file, 5),
        (HubName("people/split", None, "m-F16"), first, 6),
        (TINY, folder, size),
    ]


def test_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there, or could be mistyped, is never looked up on the hub."""
    monkeypatch.setattr(download.Hub, "fetch", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for given in ("models", "models/qwen", "nothing", "/x/y", "~nobody/x", "a\0/b"):
        assert local_model(given) == given
    assert local_model(Path("people/tiny")) == "people/tiny"
    with pytest.raises(UnsupportedModel, match="because there is a folder models here"):
        ModelConfig.read("models/qwen")
    monkeypatch.setattr(
        download.Hub, "fetch", lambda _, name, *, weights: Path(f"{name}-{weights}")
    )
    assert local_model("people/tiny:Q8_0") == "people/tiny:Q8_0-True"
    assert local_model("people/tiny", weights=False) == "people/tiny-False"
