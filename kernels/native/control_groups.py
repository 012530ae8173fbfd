"""The control groups that this process is in: what limits its time and its memory on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def control_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Each group whose `controller` ("cpu", "memory") counts this process, those around it
    included: the version of its files (1 or 2) and its folder below `root`."""
    mounted = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            for group in _groups(mounted, path):
                yield 2, group
        elif controller in controllers.split(","):
            for hierarchy in {controllers, controller}:
                for group in _groups(mounted / hierarchy, path):
                    yield 1, group


def read_text(path: Path) -> str:
    """What a file of the system says; "" where there is none."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _groups(top: Path, path: str) -> Iterator[Path]:
    """The group's folder and those around it. In a container `path` may be the host's, and `top`
    already the container's own group."""
    inner = PurePosixPath(path.lstrip("/"))
    if ".." not in inner.parts:
        for part in (inner, *inner.parents):
            if part.parts:
                yield top / part
    yield top
