"""Find a model of the hub in this machine's cache, or download it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rootlace.runtime.model.checkpoint.config import check_config
from rootlace.runtime.model.checkpoint.source import (
    INDEX,
    INDEXES,
    PICKLED,
    POOLING_FILES,
    SINGLE,
    TOKENIZERS,
    index_files,
    model_source,
    weight_names,
)
from rootlace.runtime.model.hub import HubName
from rootlace.wire.errors import RootlaceError, ServerUnavailable, UnsupportedModel

# Files --------------------------------------------------------------------------------------------


CONFIG = "config.json"
ABOUT = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    *POOLING_FILES,
)
"""Further files to read, if a repository has them."""

USUAL = "Q4_K_M"
"""GGUF format chosen if several exist and none is named."""

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
_FORMAT = re.compile(r"(?:^|[-_.])((?:IQ|Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)


def tokenizer_file(files: Collection[str]) -> str:
    """Return the file of the tokenizer; the usual name if there is none."""
    return next((name for name in TOKENIZERS if name in files), TOKENIZERS[0])


def gguf_files(name: HubName, files: Collection[str]) -> list[str]:
    """Return the files of the GGUF model that `name` means, the first part first; empty if none.
    Raises `UnsupportedModel` if the choice is not clear, or if parts are missing."""
    models = gguf_models(files)
    if name.variant is None:
        if CONFIG in files or not models:
            return []
        found = [stem for stem in models if format_of(stem) == USUAL] or list(models)
    else:
        found = _matching(name.variant.lower().removesuffix(".gguf"), models)
    if len(found) == 1:
        return _whole(name, models[found[0]])
    formats = sorted({format_of(stem) or stem for stem in models})
    has = f"there are {', '.join(formats)}" if models else "there is no GGUF file"
    which = "say which" if name.variant is None else f"{len(found) or 'no'} files match"
    raise UnsupportedModel(f"{name}: {which}, as in {name.repo}:{USUAL}; {has}")


def gguf_models(files: Collection[str]) -> dict[str, list[str]]:
    """Map each model, by its name without part number and ending, to its files; no projectors."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and "mmproj" not in file:
            found.setdefault(_SPLIT.sub("", file.removesuffix(".gguf")), []).append(file)
    return found


def format_of(stem: str) -> str | None:
    """Return the format at the end of a GGUF file's name; None without one."""
    found = _FORMAT.search(stem)
    return found[1].upper() if found else None


def weight_files(name: HubName, files: Collection[str], allow_pickle: bool = False) -> str:
    """Return the file of the weights, or the index of several. Raises `UnsupportedModel` if there
    is no readable one."""
    for file in weight_names(allow_pickle):
        if file in files:
            return file
    pickled = next((file for file in sorted(files) if file.endswith((".bin", ".pth"))), None)
    why = "the repository has no weights"
    if pickled is not None:
        allowed = "--allow-pickle (allow_pickle=True) reads the tensors, and runs no code. "
        why = (
            f"its weights are in {pickled}: such files can run code when they are read. "
            f"{allowed if any(file in files for file in PICKLED) else ''}To convert them, get it "
            f"with `hf download {name.repo} --local-dir FOLDER` and serve FOLDER, which says how"
        )
    raise UnsupportedModel(f"{name}: {why}")


def _matching(wanted: str, stems: Collection[str]) -> list[str]:
    """Match the file's name, else its format, else the end of its name, as `UD-Q4_K_XL`."""
    last = {stem: stem.rpartition("/")[2].lower() for stem in stems}
    for found in (
        [stem for stem in stems if last[stem] == wanted],
        [stem for stem in stems if str(format_of(stem)).lower() == wanted],
        [stem for stem in stems if re.search(rf"[-_.]{re.escape(wanted)}$", last[stem])],
    ):
        if found:
            return found
    return []


def _whole(name: HubName, parts: list[str]) -> list[str]:
    numbers = [_SPLIT.search(part.removesuffix(".gguf")) for part in parts]
    count = max((int(found[2]) for found in numbers if found), default=1)
    there = {int(found[1]) if found else 1 for found in numbers}
    missing = next((number for number in range(1, count + 1) if number not in there), None)
    if missing is not None:
        raise UnsupportedModel(f"{name}: part {missing} of {count} is not there")
    return parts


# Partial ------------------------------------------------------------------------------------------
#
# Download large files of the hub piece by piece, over several starts.
#
# `hf_hub_download` begins a file anew at each call, so that processes whose locks fail do
# not write to one file; so does Xet. Files downloaded here go where it looks for their content.


def bytes_to_come(sha256: str | None, size: int, folder: Path) -> int:
    """Return the number of bytes of a content of `size` bytes that `folder` still lacks."""
    blob, part = _files(sha256, folder)
    if blob.exists():
        return 0
    return max(size - part.stat().st_size, 0) if part.exists() else size


def _files(sha256: str | None, folder: Path) -> tuple[Path, Path]:
    """Return the paths of a content's whole file and of its partial file."""
    return folder / "blobs" / str(sha256), folder / "rootlace" / f"{sha256}.part"


def download_blob(url: str, sha256: str, size: int, folder: Path) -> None:
    """Download the content of `url` to `folder`, a repository's in the cache, from where an earlier
    start stopped. The sha256 is not checked. Does nothing if another process downloads the content,
    or if it is too large for plain HTTP. Raises as the hub's client does."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    blob, part = _files(sha256, folder)
    if blob.exists() or size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    part.parent.mkdir(parents=True, exist_ok=True)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        if not part.exists():  # another process has just finished
            return
        done = file.tell()
        if done > size:
            file.truncate(0)
            done = 0
        http_get(
            url,
            file,
            resume_size=done,
            headers=build_hf_headers(),
            expected_size=size,
            displayed_filename=url.rpartition("/")[2],
        )
        part.rename(blob)


# Cache --------------------------------------------------------------------------------------------
#
# List the cache of the Hugging Face hub's tools on this machine.


class Snapshot(msgspec.Struct, frozen=True):
    """Files of one commit in the cache. `refs`: the branches and tags of the commit."""

    repo: str
    commit: str
    refs: frozenset[str]
    folder: Path
    sizes: dict[str, int]
    """Bytes, by name in the repository."""

    @property
    def listed(self) -> frozenset[str] | None:
        """Files of the commit on the hub; None if the listing is unknown."""
        try:
            return frozenset(json.loads(listing_file(self.folder).read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def models(self) -> Iterator[tuple[HubName, Path, int]]:
        """Complete models: the name to serve, folder or file, and the bytes of the weights."""
        revision = None if "main" in self.refs else self.commit
        weights = self._safetensors()
        if CONFIG in self.sizes and weights and all(file in self.sizes for file in weights):
            total = sum(self.sizes[file] for file in weights)
            yield HubName(self.repo, revision), self.folder, total
        for stem in gguf_models(self.sizes):
            name = HubName(self.repo, revision, stem.rpartition("/")[2])
            with suppress(UnsupportedModel):  # a part is missing
                parts = gguf_files(name, self.sizes)
                yield name, self.folder / parts[0], sum(self.sizes[part] for part in parts)

    def _safetensors(self) -> list[str]:
        if SINGLE in self.sizes or INDEX not in self.sizes:
            return [SINGLE]
        try:
            return index_files(self.folder / INDEX)
        except UnsupportedModel:
            return []


def listing_file(snapshot: Path) -> Path:
    """Return the file with the list of all files that a snapshot's commit has on the hub."""
    return snapshot.parent.parent / "rootlace" / f"{snapshot.name}.json"


def snapshots(cache: Path | None = None) -> list[Snapshot]:
    """List the snapshots in the folder `cache` (None: the one that the hub's tools use)."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache or constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError):  # no folder, or a file in its place
        return []
    found = [
        Snapshot(
            repo.repo_id,
            revision.commit_hash,
            frozenset(revision.refs),
            Path(revision.snapshot_path),
            {
                str(file.file_path.relative_to(revision.snapshot_path)): file.size_on_disk
                for file in revision.files
            },
        )
        for repo in repos
        if repo.repo_type == "model"
        for revision in repo.revisions
    ]
    return sorted(found, key=lambda one: (one.repo.lower(), one.commit))


def cached(name: HubName, cache: Path | None = None) -> Snapshot | None:
    """Return the snapshot that `name` leads to; None if unknown here."""
    wanted = name.revision or "main"
    for one in snapshots(cache):
        if one.repo == name.repo and (wanted in one.refs or one.commit == wanted):
            return one
    return None


# Download -----------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class HubFile(msgspec.Struct, frozen=True):
    """File on the hub. `sha256`: of large files alone."""

    size: int
    sha256: str | None


class Hub(msgspec.Struct, frozen=True):
    """Client of the hub. `endpoint` and `cache` None: those of the hub's own tools (`HF_ENDPOINT`,
    `HF_HOME`). `allow_pickle`: weights may be in torch's files, if there are no others."""

    endpoint: str | None = None
    cache: Path | None = None
    allow_pickle: bool = False

    def fetch(self, name: HubName, *, weights: bool = True) -> Path:
        """Return the folder or GGUF file of a model. Without `weights`: a folder of configuration
        and tokenizer files, or a GGUF file already in the cache.

        Downloads missing files, with a progress bar. The hub is not asked for files in the cache,
        and for nothing if `HF_HUB_OFFLINE` is set. If the hub does not answer, the cache is used. A
        configuration that cannot be served is refused before the download of weights. Raises
        `UnsupportedModel` for a model that does not exist, is refused to this user, or cannot be
        served. Raises `ServerUnavailable` if the hub does not answer and the cache lacks the model.
        """
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return self._local(name, weights, "HF_HUB_OFFLINE is set")
        try:
            commit, stored = self._listing(name)
        except ServerUnavailable as error:
            found = self._local(name, weights, str(error).removeprefix(f"{name}: "))
            log.warning("%s; what is in the cache is served", error)
            return found
        parts = gguf_files(name, stored)
        if parts and not weights:
            return self._local(name, weights, f"it is downloaded by: rootlace serve {name}")
        if parts:
            path = self._take(name, commit, stored, parts)
        else:
            about = [CONFIG, *(file for file in ABOUT if file in stored)]
            path = self._take(name, commit, stored, about).parent
            # Refuse a model that cannot be served before gigabytes are downloaded.
            check_config(model_source(path), ignored=None)
            if weights:
                first = weight_files(name, stored, self.allow_pickle)
                index = self._take(name, commit, stored, [first, tokenizer_file(stored)])
                if first in INDEXES:
                    self._take(name, commit, stored, index_files(index))
        snapshot = next(place for place in (path, *path.parents) if place.name == commit)
        _remember(name, snapshot, stored, whole=weights)
        return path

    def _local(self, name: HubName, weights: bool, why: str) -> Path:
        """Return the model in the cache, as the hub would name it. Raises `ServerUnavailable` if
        files are missing, with the reason `why` the hub was not asked."""
        here, missing = cached(name, self.cache), "it is not"
        if here is not None:
            needed = self._needed(name, here, weights)
            absent = next((file for file in needed if file not in here.sizes), None)
            if absent is None:
                return here.folder if needed[0] == CONFIG else here.folder / needed[0]
            missing = f"its {absent} is not"
        raise ServerUnavailable(f"{name}: {missing} in the cache, and {why}")

    def _needed(self, name: HubName, here: Snapshot, weights: bool) -> list[str]:
        """List the files of the model; the file that names the model comes first."""
        listed = here.listed
        there = here.sizes if listed is None else listed
        parts = gguf_files(name, there)
        if parts:
            if listed is None and name.variant is None and format_of(parts[0][:-5]) != USUAL:
                raise UnsupportedModel(
                    f"{name}: the hub is not asked, and which of its files is meant is not known: "
                    f"say which, as in {name.repo}:{USUAL}"
                )
            return parts
        if not weights:
            return [CONFIG]
        try:
            first = weight_files(name, there, self.allow_pickle)
        except UnsupportedModel:
            if listed is not None:
                raise
            first = SINGLE
        indexed = first in INDEXES and first in here.sizes
        shards = index_files(here.folder / first) if indexed else []
        return [CONFIG, tokenizer_file(there), first, *shards]

    def _listing(self, name: HubName) -> tuple[str, dict[str, HubFile]]:
        """Return the commit that the hub has under this name, and its files."""
        from huggingface_hub import HfApi, errors

        try:
            info = HfApi(self.endpoint).model_info(
                name.repo, revision=name.revision, files_metadata=True, timeout=10
            )
        except errors.RevisionNotFoundError as error:
            raise UnsupportedModel(f"{name}: the model has no revision {name.revision}") from error
        except errors.HFValidationError as error:
            raise UnsupportedModel(f"{name}: {error}") from error
        except Exception as error:  # the client's exceptions differ between its versions
            raise self._failure(name, error) from error
        files = {
            one.rfilename: HubFile(one.size or 0, one.lfs.sha256 if one.lfs else None)
            for one in info.siblings or ()
        }
        return str(info.sha), files

    def _take(
        self, name: HubName, commit: str, stored: dict[str, HubFile], files: Sequence[str]
    ) -> Path:
        """Return the path of the first of these files in the cache; download and check the missing
        ones."""
        from huggingface_hub import hf_hub_download, hf_hub_url

        missing = next((file for file in files if file not in stored), None)
        if missing is not None:
            raise UnsupportedModel(f"{name}: the repository has no {missing}")
        absent = [file for file in files if not self._is_there(name, commit, file)]
        contents = [stored[file] for file in absent]
        folder = self._folder(name)
        self._check_space(
            name, sum(bytes_to_come(one.sha256, one.size, folder) for one in contents)
        )
        taken = []
        for file in files:
            # The mark stays if a check is interrupted: the next start then checks.
            mark = self._folder(name) / "rootlace" / f"{stored[file].sha256}.unchecked"
            sha256 = stored[file].sha256
            try:
                if file in absent and sha256 is not None:
                    mark.parent.mkdir(parents=True, exist_ok=True)
                    mark.touch()
                    url = hf_hub_url(name.repo, file, revision=commit, endpoint=self.endpoint)
                    download_blob(url, sha256, stored[file].size, self._folder(name))
                found = hf_hub_download(
                    name.repo, file, endpoint=self.endpoint, revision=commit, cache_dir=self._cache
                )
            except Exception as error:  # as above
                raise self._failure(name, error) from error
            taken.append(Path(found))
            if mark.exists():
                _check(name, taken[-1], stored[file])
                mark.unlink()
        return taken[0]

    @property
    def _cache(self) -> Path:
        from huggingface_hub import constants

        return Path(self.cache or constants.HF_HUB_CACHE)

    def _folder(self, name: HubName) -> Path:
        return self._cache / f"models--{name.repo.replace('/', '--')}"

    def _is_there(self, name: HubName, commit: str, file: str) -> bool:
        return (self._folder(name) / "snapshots" / commit / file).is_file()

    def _check_space(self, name: HubName, needed: int) -> None:
        cache = self._cache
        there = next(place for place in (cache, *cache.parents) if place.exists())
        free = shutil.disk_usage(there).free
        if needed > free:
            raise UnsupportedModel(
                f"{name}: its files take {needed / 1e9:,.1f} GB more, and {cache} has "
                f"{free / 1e9:,.1f} GB left"
            )

    def _failure(self, name: HubName, error: Exception) -> RootlaceError:
        """Turn an exception of the hub's client into a typed error."""
        from huggingface_hub import errors

        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, errors.GatedRepoError):
            return UnsupportedModel(
                f"{name}: only for those who accepted its conditions: do so at "
                f"https://huggingface.co/{name.repo}, and log in with `hf auth login`"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return UnsupportedModel(
                f"{name}: there is no such folder, and no such model on the Hugging Face hub "
                "(of a private one: log in with `hf auth login`)"
            )
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
            return UnsupportedModel(
                f"{name}: the hub refuses the token: log in with `hf auth login`"
            )
        network = (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, ConnectionError)
        if isinstance(error, OSError) and not isinstance(error, (*network, TimeoutError)):
            return UnsupportedModel(
                f"{name}: it cannot be written to the cache {self._cache}: {why}"
            )
        return ServerUnavailable(f"{name}: the Hugging Face hub cannot be reached: {why}")


def _remember(name: HubName, snapshot: Path, stored: dict[str, HubFile], *, whole: bool) -> None:
    """Record, for use without the hub, the commit of a name and its files on the hub. A snapshot
    that is not `whole` does not replace another."""
    revision = name.revision or "main"
    ref = snapshot.parent.parent / "refs" / revision
    with suppress(OSError):  # a read-only cache
        _write(listing_file(snapshot), json.dumps(sorted(stored)))
        if revision != snapshot.name and (whole or not ref.exists()):
            _write(ref, snapshot.name)


def _write(file: Path, text: str) -> None:
    """Write the file at once, unless it has this text already."""
    if file.is_file() and file.read_text("utf-8") == text:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    other = file.with_name(f"{file.name}.{os.getpid()}")
    other.write_text(text, "utf-8")
    other.replace(file)


def _check(name: HubName, path: Path, stored: HubFile) -> None:
    """Check a file's sha256. Removes a damaged file, and raises `ServerUnavailable`."""
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != stored.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise ServerUnavailable(
            f"{name}: {path.name} arrived damaged (its sha256 is {found}, the hub's is "
            f"{stored.sha256}); it was removed, try again"
        )
