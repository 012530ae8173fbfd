"""Wheels of a few files, for tests of what pip downloads and installs."""

import base64
import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest


def ask_pip(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Configure pip for the wheels of a folder, and nothing else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def wheel(folder: Path, package: str, files: Mapping[str, bytes], version: str = "1.0") -> Path:
    """A wheel as small as pip takes one."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{package.replace('-', '_')}-{version}"
    about = f"{stem}.dist-info"
    said = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        "Requires-Dist: a-package-that-nobody-has\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        record = [f"{about}/RECORD,,"]
        for name, data in [*files.items(), *((key, text.encode()) for key, text in said.items())]:
            archive.writestr(name, data)
            sha256 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            record.append(f"{name},sha256={sha256},{len(data)}")
        archive.writestr(f"{about}/RECORD", "\n".join(record) + "\n")
    return path


def install(monkeypatch: pytest.MonkeyPatch, path: Path, site: Path) -> None:
    """What pip does with a wheel of plain files, where Python looks for packages."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)
