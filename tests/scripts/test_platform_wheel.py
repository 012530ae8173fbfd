"""A wheel of plain Python becomes one for a platform."""

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import platform_wheel


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


def test_libraries_tag_and_record(tmp_path: Path) -> None:
    library = tmp_path / "avx2.so"
    library.write_bytes(b"machine code")
    tag = "manylinux_2_36_x86_64"
    made = platform_wheel.platform_wheel(plain_wheel(tmp_path), [library], tag, tmp_path)
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


def test_a_wheel_for_a_platform_is_not_changed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not for any platform"):
        platform_wheel.platform_wheel(tmp_path / "a-1-py3-none-linux_x86_64.whl", [], "t", tmp_path)


def test_processors_by_the_names_that_zig_has() -> None:
    v4 = ("-march=x86-64-v4", "-mavx512bf16")
    assert platform_wheel.target_for("g++", v4) == v4
    assert platform_wheel.target_for("/tmp/zig-x86_64", v4) == ("-march=x86_64_v4", "-mavx512bf16")
    assert platform_wheel.target_for("zig-x86_64", ("-march=x86-64",)) == ("-march=x86_64",)
    arm = {"armv8-a": "v8a", "armv8.2-a+bf16+dotprod": "v8_2a+bf16+dotprod"}
    for flags, expected in arm.items():
        found = platform_wheel.target_for("zig-aarch64", (f"-march={flags}",))
        assert found == (f"-mcpu=generic+{expected}",)


def test_zig_links_for_an_old_c_library(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="`make wheels` installs it")
    source, library = tmp_path / "team.cpp", tmp_path / "team.so"
    source.write_text(
        "#include <cmath>\n#include <condition_variable>\n#include <thread>\n"
        'extern "C" double one(double x) {\n'
        "  std::thread([&] { x = std::exp(x); }).join();\n  return x;\n}\n"
    )
    compiler = platform_wheel.compiler_for("x86_64", tmp_path)
    command = [compiler, "-O3", "-fPIC", "-shared", *platform_wheel.ZIG_LINK, str(source)]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=280)
    assert platform_wheel.glibc([library]) <= platform_wheel.LINKED_FOR


def test_the_oldest_c_library_that_will_do() -> None:
    # Python itself: whatever it wants, this machine's C library has it.
    import platform

    if platform.libc_ver()[0] != "glibc":
        pytest.skip("another C library")
    has = tuple(int(part) for part in platform.libc_ver()[1].split(".")[:2])
    try:
        wanted = platform_wheel.glibc([Path(sys.executable).resolve()])
    except FileNotFoundError:
        pytest.skip("needs readelf")
    assert (2, 17) <= wanted <= has
