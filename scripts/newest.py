"""Show which dependency has a newer release than `constraints.txt`, and whether `pyproject.toml`
admits that release.

    python scripts/newest.py          those that pyproject.toml names
    python scripts/newest.py --all    all that are pinned

pip asks the index for each name.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
APART = ("clients-all", "tools")
"""Extras with environments of their own, which pin their packages themselves."""
AT_ONCE = 8
"""Questions to the index under way."""


def requirements(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, list[Requirement]]:
    """Return the requirement on each dependency, over all extras but `APART`."""
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in extras if name not in APART)]
    found: dict[str, list[Requirement]] = {}
    for one in map(Requirement, chain.from_iterable(lists)):
        found.setdefault(canonicalize_name(one.name), []).append(one)
    return found


def pinned(constraints: Path = ROOT / "constraints.txt") -> dict[str, Version]:
    lines = (line.split("#")[0].strip() for line in constraints.read_text("utf-8").splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def newest(name: str) -> Version | None:
    """Return the newest release on the index that is no pre-release; None without one."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", name], capture_output=True, text=True
    )
    found = re.search(r"\((\S+)\)", asked.stdout)
    return Version(found.group(1)) if asked.returncode == 0 and found else None


def admits(required: Iterable[Requirement], version: Version) -> bool:
    return all(one.specifier.contains(version) for one in required)


def main() -> int:
    parser = argparse.ArgumentParser(description="Newer releases than those that are tested.")
    parser.add_argument("--all", action="store_true", help="what dependencies depend on, too")
    arguments = parser.parse_args()
    required, tested = requirements(), pinned()
    names = sorted(tested if arguments.all else required.keys() & tested.keys())
    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = dict(zip(names, threads.map(newest, names), strict=True))
    table = Table("dependency", "tested", "newest", "admitted")
    for name, version in found.items():
        if version is None:
            table.add_row(name, str(tested[name]), "unknown", "")
        elif version > tested[name]:
            by = required.get(name, [])
            table.add_row(
                name, str(tested[name]), str(version), "yes" if admits(by, version) else "NO"
            )
    Console().print(table)
    print(
        f"{len(names)} names, {table.row_count} of them with a newer release or without an answer"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
