"""A model that a user named, as a path on this machine."""

from __future__ import annotations

from pathlib import Path

from rootlace.runtime.model.hub.name import HubName


def local_model(given: str | Path, *, weights: bool = True, allow_pickle: bool = False) -> str:
    """The folder or file `given`; of a name on the hub (never a `Path`), where it is in the cache
    (`Hub.fetch`).

    Raises what `Hub.fetch` raises. What is no such name is returned as it is, for others to say
    what is wrong with it.
    """
    name = None if isinstance(given, Path) else HubName.parse(given)
    # `Qwen/Qwen3-0.6B`, but not `models/qwen` where there is a folder `models`.
    if name is None or Path(given).parent.is_dir():
        return str(given)
    from rootlace.runtime.model.hub.download import Hub

    return str(Hub(allow_pickle=allow_pickle).fetch(name, weights=weights))
