"""Tries the first changes that CONTRIBUTING.md shows: their diffs apply, and their tests pass.

python scripts/first_changes.py [--run] [TITLE ...]

Each section below "First changes" holds a diff and the commands that test it. Without `--run` the
diff is applied to copies of the files that it names, and these are compiled. With `--run` it is
applied to a copy of the whole tree, and the commands run there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("frontend/", "runtime/", "kernels/")
_COPIED = (*(folder.strip("/") for folder in PRODUCT), "tests", "scripts", "docs", "examples")
_FILES = ("pyproject.toml", "CONTRIBUTING.md", "README.md", "Makefile")
_SECTION = re.compile(r"^## First changes\n(.*?)(?=^## )", re.M | re.S)
_TITLE = re.compile(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", re.M | re.S)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_CHANGED = re.compile(r"^\+\+\+ b/(.+)$", re.M)


class DoesNotWork(Exception):
    """Raised when a first change cannot be made as written; the message says where."""


@dataclass(frozen=True)
class FirstChange:
    """A section: title, text, diff and commands."""

    title: str
    prose: str
    diff: str
    commands: tuple[str, ...]

    @property
    def changed(self) -> list[str]:
        """Return the files that the diff changes or adds."""
        return _CHANGED.findall(self.diff)

    def apply(self, tree: Path) -> None:
        """Apply the diff below `tree`, and compile what it changes. Raises DoesNotWork."""
        done = subprocess.run(
            ["git", "apply", "-p1", "-"],
            cwd=tree,
            env={**os.environ, "GIT_DIR": os.devnull},  # `tree` may lie in a repository
            input=self.diff,
            text=True,
            capture_output=True,
        )
        if done.returncode:
            raise DoesNotWork(f"{self.title}: the diff does not apply: {done.stderr.strip()}")
        for name in self.changed:
            if name.endswith(".py"):
                try:
                    compile((tree / name).read_text("utf-8"), name, "exec")
                except SyntaxError as error:
                    raise DoesNotWork(f"{self.title}: {name}: {error}") from None

    def check(self) -> None:
        """Apply the diff to copies of the files that it changes. Raises DoesNotWork."""
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            for name in self.changed:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / name).exists():
                    shutil.copy(ROOT / name, tree / name)
            self.apply(tree)

    def run(self) -> None:
        """Apply the diff to a copy of the tree and run the commands there. Raises DoesNotWork."""
        with tempfile.TemporaryDirectory() as folder:
            tree, package = Path(folder) / "tree", Path(folder) / "import" / "rootlace"
            tree.mkdir()
            package.mkdir(parents=True)
            for name in _COPIED:
                ignored = shutil.ignore_patterns("__pycache__", "node_modules")
                shutil.copytree(ROOT / name, tree / name, ignore=ignored)
            for name in _FILES:
                shutil.copy(ROOT / name, tree / name)
            if (shared := ROOT.parent / "shared").is_dir():  # files with which some tests compare
                (tree.parent / "shared").symlink_to(shared)
            self.apply(tree)
            # Imports name `rootlace.runtime`, but the folder is runtime/.
            for entry in [*(tree / "frontend").iterdir(), tree / "runtime", tree / "kernels"]:
                (package / entry.name).symlink_to(entry)
            for command in self.commands:
                python, *rest = shlex.split(command)
                if python != "python":
                    raise DoesNotWork(f"{self.title}: {command}: only python is run here")
                print(f"{self.title}: {command}", flush=True)
                environment = {**os.environ, "PYTHONPATH": str(package.parent)}
                done = subprocess.run([sys.executable, *rest], cwd=tree, env=environment)
                if done.returncode:
                    raise DoesNotWork(f"{self.title}: {command} ended with {done.returncode}")


def first_changes(text: str) -> list[FirstChange]:
    """Return the sections of CONTRIBUTING.md that show a change. Raises DoesNotWork if one lacks a
    diff or commands."""
    section = _SECTION.search(text)
    if section is None:
        raise DoesNotWork("CONTRIBUTING.md has no section 'First changes'")
    found = []
    for title, content in _TITLE.findall(section[1]):
        blocks = dict(_BLOCK.findall(content))
        if blocks.keys() != {"diff", "sh"}:
            raise DoesNotWork(f"{title}: one diff and one block of commands are needed")
        commands = tuple(line for line in blocks["sh"].splitlines() if line.strip())
        found.append(FirstChange(title, _BLOCK.sub("", content).strip(), blocks["diff"], commands))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run the commands in a copy of the tree")
    parser.add_argument("titles", nargs="*", help="all by default")
    given = parser.parse_args()
    try:
        changes = first_changes((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
        for change in changes:
            if not given.titles or change.title in given.titles:
                change.check()
                if given.run:
                    change.run()
                print(f"{change.title}: {len(change.changed)} files", flush=True)
    except DoesNotWork as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
