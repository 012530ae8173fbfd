"""Large files of the hub, downloaded piece by piece over several starts.

`hf_hub_download` begins a file anew whenever it is called, so that processes whose locks fail do
not write to one file; so does Xet. What is downloaded here is put where it looks for the content.
"""

from __future__ import annotations

import fcntl
from pathlib import Path


def bytes_to_come(sha256: str | None, size: int, folder: Path) -> int:
    """How much of a file of this content `folder` still has no bytes of."""
    blob, part = _files(sha256, folder)
    if blob.exists():
        return 0
    return max(size - part.stat().st_size, 0) if part.exists() else size


def _files(sha256: str | None, folder: Path) -> tuple[Path, Path]:
    """A content that is whole, and one that is not."""
    return folder / "blobs" / str(sha256), folder / "rootlace" / f"{sha256}.part"


def download_blob(url: str, sha256: str, size: int, folder: Path) -> None:
    """Have `folder`, a repository's in the cache, hold the content of `url`, from where an earlier
    start was stopped. Its sha256 is not checked. Does nothing where another process downloads it,
    or where it is larger than what is sent over plain HTTP. Raises what the hub's client does."""
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
        if not part.exists():  # the other one has just finished
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
