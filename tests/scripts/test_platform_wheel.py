"""A wheel of plain Python becomes one for a platform."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import platform_wheel

    return platform_wheel


def plain_wheel(folder: Path) -> Path:
    path = folder / "rootlace-1.0-py3-none-any.whl"
    about = "rootlace-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("rootlace/__init__.py", "x = 1\n")
        wheel.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{about}/RECORD", "rootlace/__init__.py,sha256=old,6\n")
    return path


def test_libraries_tag_and_record(script: Any, tmp_path: Path) -> None:
    library = tmp_path / "avx2.so"
    library.write_bytes(b"machine code")
    tag = "manylinux_2_36_x86_64"
    made = script.platform_wheel(plain_wheel(tmp_path), [library], tag, tmp_path)
    assert made.name == f"rootlace-1.0-py3-none-{tag}.whl"
    with zipfile.ZipFile(made) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
    assert contents["rootlace/kernels/native/prebuilt/avx2.so"] == b"machine code"
    described = contents["rootlace-1.0.dist-info/WHEEL"].decode().splitlines()
    assert f"Tag: py3-none-{tag}" in described and "Root-Is-Purelib: false" in described
    record = contents.pop("rootlace-1.0.dist-info/RECORD").decode().splitlines()
    assert record.pop() == "rootlace-1.0.dist-info/RECORD,,"
    for line in record:
        name, digest, size = line.split(",")
        found = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).decode()
        assert digest == "sha256=" + found.rstrip("=") and int(size) == len(contents.pop(name))
    assert not contents


def test_a_wheel_for_a_platform_is_not_changed(script: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not for any platform"):
        script.platform_wheel(tmp_path / "a-1-py3-none-linux_x86_64.whl", [], "t", tmp_path)


def test_the_oldest_c_library_that_will_do(script: Any) -> None:
    # Python itself: whatever it wants, this machine's C library has it.
    import platform

    if platform.libc_ver()[0] != "glibc":
        pytest.skip("another C library")
    has = tuple(int(part) for part in platform.libc_ver()[1].split(".")[:2])
    try:
        wanted = script.glibc([Path(sys.executable).resolve()])
    except FileNotFoundError:
        pytest.skip("needs readelf")
    assert (2, 17) <= wanted <= has
