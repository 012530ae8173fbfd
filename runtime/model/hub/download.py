"""A model of the hub, in the cache on this machine: found there, or downloaded."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.folder import INDEX
from rootlace.runtime.model.hub.cache import Snapshot, cached
from rootlace.runtime.model.hub.files import ABOUT, CONFIG, gguf_files, weight_files
from rootlace.runtime.model.hub.name import HubName
from rootlace.wire.errors import ServerUnavailable, UnsupportedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """A file as the hub has it. `sha256`: of large files alone."""

    size: int
    sha256: str | None


@dataclass(frozen=True)
class Hub:
    """`endpoint` and `cache` None: those of the hub's own tools (`HF_ENDPOINT`, `HF_HOME`)."""

    endpoint: str | None = None
    cache: Path | None = None

    def fetch(self, name: HubName, *, weights: bool = True) -> Path:
        """The folder or GGUF file of a model, with its weights or with what describes it alone.

        Downloads what is not there, with a progress bar, going on where an earlier download ended;
        asks the hub for nothing that the cache has, and for nothing at all where `HF_HUB_OFFLINE`
        is set. Where the hub cannot be reached, the cache is what there is. A configuration that
        cannot be served is refused before its weights are downloaded. Raises `UnsupportedModel`
        for a model that is not there, is refused to this user, or cannot be served, and
        `ServerUnavailable` where the hub does not answer and the cache does not have it.
        """
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return self._local(name, weights, "HF_HUB_OFFLINE is set")
        try:
            commit, stored = self._listing(name)
        except ServerUnavailable as error:
            found = self._local(name, weights, str(error))
            log.warning("%s; %s is served as it is in the cache", error, name)
            return found
        parts = gguf_files(name, stored)
        if parts:
            return self._take(name, commit, stored, parts)[0]
        about = [CONFIG, *(file for file in ABOUT if file in stored)]
        folder = self._take(name, commit, stored, about)[0].parent
        ModelConfig.read(folder)  # refuses what cannot be served before gigabytes are downloaded
        if weights:
            first = weight_files(name, stored)
            (path,) = self._take(name, commit, stored, [first])
            if first == INDEX:
                self._take(name, commit, stored, _shards(path))
        return folder

    def _local(self, name: HubName, weights: bool, why: str) -> Path:
        """What the cache has. Raises `ServerUnavailable`, with why the hub was not asked, where
        that is not all."""
        here = cached(name, self.cache)
        missing = "it is not"
        if here is not None:
            parts = gguf_files(name, here.sizes)
            if parts:
                return here.folder / parts[0]
            missing = _missing(name, here, weights)
            if not missing:
                return here.folder
        raise ServerUnavailable(f"{name}: {missing} in the cache, and {why}")

    def _listing(self, name: HubName) -> tuple[str, dict[str, Stored]]:
        """The commit that the hub has under this name, and its files."""
        from huggingface_hub import HfApi, errors

        try:
            info = HfApi(self.endpoint).model_info(
                name.repo, revision=name.revision, files_metadata=True, timeout=10
            )
        except errors.GatedRepoError as error:
            raise _refused(name) from error
        except errors.RepositoryNotFoundError as error:
            raise UnsupportedModel(
                f"{name}: there is no such folder, and no such model on the Hugging Face hub "
                "(of a private one: log in with `hf auth login`)"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise UnsupportedModel(f"{name}: the model has no revision {name.revision}") from error
        except errors.HFValidationError as error:
            raise UnsupportedModel(f"{name}: {error}") from error
        except Exception as error:  # its HTTP client's own, which differs between its versions
            raise _unreachable(error) from error
        files = {
            one.rfilename: Stored(one.size or 0, one.lfs.sha256 if one.lfs else None)
            for one in info.siblings or ()
        }
        return str(info.sha), files

    def _take(
        self, name: HubName, commit: str, stored: dict[str, Stored], files: Collection[str]
    ) -> list[Path]:
        """The paths of these files in the cache; what is not there is downloaded and checked."""
        from huggingface_hub import errors, hf_hub_download

        missing = next((file for file in files if file not in stored), None)
        if missing is not None:
            raise UnsupportedModel(f"{name}: the repository has no {missing}")
        place: dict[str, Any] = {"revision": commit, "cache_dir": self.cache}
        self._check_space(name, stored, self._absent(name, commit, files))
        taken = []
        for file in files:
            there = file not in self._absent(name, commit, [file])
            try:
                path = Path(hf_hub_download(name.repo, file, endpoint=self.endpoint, **place))
            except errors.GatedRepoError as error:
                raise _refused(name) from error
            except Exception as error:  # as above
                raise _unreachable(error) from error
            if not there:
                _verify(name, path, stored[file])
            taken.append(path)
        self._remember(name, commit, taken[0])
        return taken

    @staticmethod
    def _remember(name: HubName, commit: str, path: Path) -> None:
        """Which commit the revision is, for when the hub is not asked."""
        revision = name.revision or "main"
        if revision != commit:
            snapshot = next(folder for folder in path.parents if folder.name == commit)
            file = snapshot.parent.parent / "refs" / revision
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(commit)

    def _absent(self, name: HubName, commit: str, files: Iterable[str]) -> list[str]:
        from huggingface_hub import try_to_load_from_cache

        def is_there(file: str) -> bool:
            found = try_to_load_from_cache(name.repo, file, self.cache, revision=commit)
            return isinstance(found, str)

        return [file for file in files if not is_there(file)]

    def _check_space(self, name: HubName, stored: dict[str, Stored], files: list[str]) -> None:
        from huggingface_hub import constants

        needed = sum(stored[file].size for file in files)
        folder = Path(self.cache or constants.HF_HUB_CACHE)
        there = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(there).free
        if needed > free:
            raise UnsupportedModel(
                f"{name}: its files take {needed / 1e9:,.1f} GB more, and {folder} has "
                f"{free / 1e9:,.1f} GB left"
            )


def _shards(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"{index}: not an index of weights: {error}") from error


def _missing(name: HubName, here: Snapshot, weights: bool) -> str:
    """Which file is missing, as a sentence's beginning; empty where none is."""
    needed = [CONFIG]
    if weights and CONFIG in here.sizes:
        needed += [weight_files(name, here.sizes), "tokenizer.json"]
        if INDEX in needed:
            needed += _shards(here.folder / INDEX)
    absent = next((file for file in needed if file not in here.sizes), None)
    return f"its {absent} is not" if absent else ""


def _verify(name: HubName, path: Path, stored: Stored) -> None:
    """A file that was cut short or changed on its way is not kept."""
    if stored.sha256 is None:
        return
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != stored.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise ServerUnavailable(
            f"{name}: {path.name} arrived damaged (its sha256 is {found}, the hub's is "
            f"{stored.sha256}); it was removed, try again"
        )


def _refused(name: HubName) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name}: only for those who accepted its conditions: do so at "
        f"https://huggingface.co/{name.repo}, and log in with `hf auth login`"
    )


def _unreachable(error: Exception) -> ServerUnavailable:
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ServerUnavailable(f"the Hugging Face hub cannot be reached: {why}")
