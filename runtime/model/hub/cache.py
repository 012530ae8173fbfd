"""What is in the cache of the Hugging Face hub's tools on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rootlace.runtime.model.checkpoint.folder import INDEX, SINGLE, index_files
from rootlace.runtime.model.hub.files import CONFIG, gguf_files, gguf_models
from rootlace.runtime.model.hub.name import HubName
from rootlace.wire.errors import UnsupportedModel


@dataclass(frozen=True)
class Snapshot:
    """The files of one commit that are here. `refs`: the branches and tags that lead to it."""

    repo: str
    commit: str
    refs: frozenset[str]
    folder: Path
    sizes: dict[str, int]
    """Bytes, by name in the repository."""

    @property
    def listed(self) -> frozenset[str] | None:
        """All files that the commit has on the hub; None where that is not known."""
        try:
            return frozenset(json.loads(listing_file(self.folder).read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def models(self) -> Iterator[tuple[HubName, Path, int]]:
        """What is whole, by the name that it is served by, with its folder or file and the bytes
        of its weights."""
        revision = None if "main" in self.refs else self.commit
        weights = self._safetensors()
        if CONFIG in self.sizes and weights and all(file in self.sizes for file in weights):
            total = sum(self.sizes[file] for file in weights)
            yield HubName(self.repo, revision), self.folder, total
        for stem in gguf_models(self.sizes):
            name = HubName(self.repo, revision, stem.rpartition("/")[2])
            with suppress(UnsupportedModel):  # a part of it is missing
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
    """What a snapshot's commit has on the hub is kept here, beside what the hub's tools keep."""
    return snapshot.parent.parent / "rootlace" / f"{snapshot.name}.json"


def snapshots(cache: Path | None = None) -> list[Snapshot]:
    """All that are in the folder `cache` (None: the one that the hub's tools use)."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache or constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError):  # there is none, or a file in its place
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
    """The snapshot that `name` leads to, as far as it is known here."""
    wanted = name.revision or "main"
    for one in snapshots(cache):
        if one.repo == name.repo and (wanted in one.refs or one.commit == wanted):
            return one
    return None
