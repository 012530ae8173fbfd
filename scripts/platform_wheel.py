"""Give a wheel of plain Python the native kernels of one architecture, compiled.

    python scripts/platform_wheel.py WHEEL [--architecture aarch64] [--into FOLDER]

All instruction sets of the architecture are compiled, each into a library of its own that lies
beside the sources: by Zig's C++ compiler where the package `ziglang` is installed, which brings the
symbols of old C libraries along, else by g++ or Debian's cross compiler (`aarch64-linux-gnu-g++`).
The C++ library is linked in; what is wanted of the C library is the least version with all its
symbols in use, which the wheel's platform tag names (PEP 600).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rootlace.kernels.native.build import (
    INSTRUCTION_SETS,
    SOURCES,
    NativeUnavailable,
    compile_library,
    find_compiler,
)

FOLDER = "rootlace/kernels/native/prebuilt"
LINKED_FOR = (2, 28)
"""The C library that Zig's compiler is told to link for: that of Debian 10 and RHEL 8."""
LINK = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")
ZIG_LINK = ("-Wl,-Bsymbolic", "-s")
"""Zig links its own C++ library in, and shows nothing of it."""
SYMBOL = re.compile(r"\bGLIBC_(\d+)\.(\d+)")
OLDEST_GLIBC = (2, 17)
"""Of the platform tags there are."""


def compiler_for(architecture: str, folder: Path) -> str:
    """Return the compiler's name or path, which may not exist. A script in `folder` calls Zig."""
    if importlib.util.find_spec("ziglang") is None:
        return "g++" if architecture == platform.machine() else f"{architecture}-linux-gnu-g++"
    script = folder / f"zig-{architecture}"
    target = f"{architecture}-linux-gnu.{LINKED_FOR[0]}.{LINKED_FOR[1]}"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang c++ -target {target} "$@"\n')
    script.chmod(0o755)
    return str(script)


def target_for(compiler: str, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return flags for an instruction set; Zig has other names for processors."""
    if not is_zig(compiler):
        return flags
    first, *others = flags
    if first.startswith("-march=arm"):  # armv8.2-a+bf16: Zig calls "v8_2a" a feature
        version, _, features = first.removeprefix("-march=armv").partition("+")
        version = version.replace(".", "_").replace("-", "")
        return (
            f"-mcpu=generic+v{version}" + "".join(f"+{one}" for one in features.split("+") if one),
        )
    return (first.replace("x86-64", "x86_64").replace("-v", "_v"), *others)


def is_zig(compiler: str) -> bool:
    return Path(compiler).name.startswith("zig-")


def compile_all(architecture: str, folder: Path) -> list[Path]:
    """Compile a library for each instruction set, named after it. Raises `NativeUnavailable`."""
    made = []
    for instructions in INSTRUCTION_SETS[architecture]:
        name = compiler_for(architecture, folder)
        compiler = find_compiler(name, target_for(name, instructions.target))
        if compiler is None:
            raise NativeUnavailable(f"there is no {name}")
        library = folder / f"{instructions.name}.so"
        with tempfile.TemporaryDirectory() as work:
            link = ZIG_LINK if is_zig(name) else LINK
            compile_library(compiler, SOURCES, Path(work), library, link)
        made.append(library)
    return made


def glibc(libraries: list[Path]) -> tuple[int, int]:
    """Return the oldest C library with all symbols that the libraries need."""
    command = ["readelf", "--wide", "--version-info", *map(str, libraries)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max([OLDEST_GLIBC, *((int(a), int(b)) for a, b in SYMBOL.findall(told))])


def platform_wheel(wheel: Path, libraries: list[Path], tag: str, folder: Path) -> Path:
    """Make a copy of `wheel` in `folder` with the libraries, for the platform `tag` alone."""
    head = wheel.name.removesuffix("-any.whl")
    if head == wheel.name:
        raise ValueError(f"{wheel.name} is not for any platform")
    made = folder / f"{head}-{tag}.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        contents = {info.filename: old.read(info) for info in old.infolist()}
        (about,) = {name.split("/")[0] for name in contents if ".dist-info/" in name}
        described = contents[f"{about}/WHEEL"].decode()
        described = described.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        contents[f"{about}/WHEEL"] = described.replace("none-any", f"none-{tag}").encode()
        contents |= {f"{FOLDER}/{library.name}": library.read_bytes() for library in libraries}
        record = f"{about}/RECORD"
        del contents[record]
        lines = [f"{name},{_digest(content)},{len(content)}" for name, content in contents.items()]
        contents[record] = "\n".join([*lines, f"{record},,", ""]).encode()
        for name, content in contents.items():
            new.writestr(name, content)
    return made


def make(wheel: Path, architecture: str, folder: Path) -> Path:
    """Compile, and make a copy of `wheel` with the libraries. Raises `NativeUnavailable`."""
    with tempfile.TemporaryDirectory() as work:
        libraries = compile_all(architecture, Path(work))
        major, minor = glibc(libraries)
        tag = f"manylinux_{major}_{minor}_{architecture}"
        return platform_wheel(wheel, libraries, tag, folder)


def _digest(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={digest.decode().rstrip('=')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--architecture", default=platform.machine(), choices=["x86_64", "aarch64"])
    parser.add_argument("--into", type=Path, help="folder of the new wheel; the old one's")
    arguments = parser.parse_args()
    try:
        made = make(
            arguments.wheel, arguments.architecture, arguments.into or arguments.wheel.parent
        )
    except NativeUnavailable as error:
        sys.exit(f"no wheel for {arguments.architecture}: {error}")
    print(made)


if __name__ == "__main__":
    main()
