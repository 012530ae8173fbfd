"""What is in the cache of the Hugging Face hub's tools on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rootlace.runtime.model.checkpoint.folder import INDEX, SINGLE
from rootlace.runtime.model.hub.files import CONFIG, gguf_files
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
    def models(self) -> Iterator[tuple[HubName, Path, int]]:
        """What can be named and served, the folder or file that it is, and the bytes of its
        weights."""
        revision = None if "main" in self.refs else self.commit
        if CONFIG in self.sizes and (SINGLE in self.sizes or INDEX in self.sizes):
            weights = sum(
                size for name, size in self.sizes.items() if name.endswith(".safetensors")
            )
            yield HubName(self.repo, revision), self.folder, weights
        seen: set[str] = set()
        for file in sorted(self.sizes):
            if not file.endswith(".gguf") or file in seen:
                continue
            name = HubName(self.repo, revision, Path(file).stem)
            try:
                parts = gguf_files(name, self.sizes)
            except UnsupportedModel:  # not by this name: a projector of images
                continue
            seen.update(parts)
            if parts:
                yield name, self.folder / parts[0], sum(self.sizes[part] for part in parts)


def snapshots(cache: Path | None = None) -> list[Snapshot]:
    """All that are in the folder `cache` (None: the one that the hub's tools use)."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache or constants.HF_HUB_CACHE).repos
    except CacheNotFound:
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
