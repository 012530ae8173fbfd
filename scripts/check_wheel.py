"""Build the wheels, install one into fresh environments and use it from an empty directory.

    python scripts/check_wheel.py [--keep FOLDER]

There is a wheel of plain Python, and one for each architecture that there is a compiler for, with
the native kernels in it (`platform_wheel.py`). This machine's is tried; of another architecture the
kernels alone, under qemu's user emulation where that is installed. Two installations: the light
client (no extras: it must import, without torch being there at all) and `[runtime]`, which must
answer a program on the embedded model and, without a compiler, have native kernels. Nothing of the
checkout is reachable from either: they run in an empty folder, with Python's isolated mode.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import platform_wheel

from rootlace.kernels.native.build import INSTRUCTION_SETS, find_compiler

ROOT = Path(__file__).resolve().parent.parent

LIGHT = """
import sys
import rootlace
from importlib.metadata import requires, version

loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"torch", "numpy", "transformers", "aiohttp"}, loaded
assert version("rootlace")
assert rootlace.function and rootlace.gen and rootlace.RuntimeEndpoint
try:
    import torch
except ImportError:
    pass
else:
    raise AssertionError("the light client's environment has torch")
"""

PROGRAM = """
import json
import rootlace as rl
from rootlace.runtime.assets import demo_model

@rl.function
def pick(s):
    s += "Two and two make " + rl.select("answer", ["four", "nine"])
    s += rl.gen("more", max_tokens=4, temperature=0)
    s += rl.gen("code", regex="[0-9]{2}(?!0)[0-9]")
    unique = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}
    s += rl.gen("unique", json_schema=unique)

with rl.Runtime(model=demo_model()) as runtime:
    state = pick.run(backend=runtime)
    assert state["answer"] in ("four", "nine"), state["answer"]
    assert state["more"], state.text()
    assert len(state["code"]) == 3 and state["code"][2] != "0", state["code"]
    assert sorted(json.loads(state["unique"])) == [1, 2], state["unique"]
    print(state.text())
"""


ARCHITECTURES = ("x86_64", "aarch64")

OPEN = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** paths) {
  for (int i = 1; i < count; i++) {
    void* library = dlopen(paths[i], RTLD_NOW);
    if (!library) return puts(dlerror()), 1;
    puts(((const char* (*)())dlsym(library, "rl_instructions"))());
  }
}
"""


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its standard output; show its output if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        text=True,
        capture_output=True,
        timeout=3600,
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        raise SystemExit(f"wheel: {Path(str(command[0])).name} failed ({done.returncode})")
    return done.stdout


def build(folder: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder)
    (wheel,) = folder.glob("*-any.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"rootlace/__init__.py", "rootlace/py.typed", "rootlace/runtime/config.py"}
    expected |= {"rootlace/kernels/__init__.py", "rootlace/runtime/assets/demo/model.safetensors"}
    expected |= {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in (
            ("rootlace", "frontend"),
            ("rootlace/runtime", "runtime"),
            ("rootlace/kernels", "kernels"),
        )
        for path in (ROOT / folder).rglob("*.py")
    }
    tables = (ROOT / "kernels" / "triton" / "tuned").glob("*.json")
    expected |= {f"rootlace/kernels/triton/tuned/{table.name}" for table in tables}
    costs = (ROOT / "runtime" / "simulation" / "costs").glob("*.json")
    expected |= {f"rootlace/runtime/simulation/costs/{cost.name}" for cost in costs}
    missing = sorted(expected - names)
    if missing:
        raise SystemExit("wheel: not in the wheel: " + ", ".join(missing))
    stray = sorted(n for n in names if not n.startswith(("rootlace/", "rootlace-")))
    if stray:
        raise SystemExit("wheel: does not belong into the wheel: " + ", ".join(stray))


def check_kernels(wheel: Path, architecture: str, work: Path) -> None:
    """Check that each library exists and, if it can be run, reports its own instruction set."""
    wanted = [one.name for one in INSTRUCTION_SETS[architecture]]
    files = [f"{platform_wheel.FOLDER}/{name}.so" for name in wanted]
    with zipfile.ZipFile(wheel) as archive:
        paths = [archive.extract(file, work / architecture) for file in files]
    emulator = [] if is_own(architecture) else [f"qemu-{architecture}-static"]
    if emulator and shutil.which(emulator[0]) is None:
        print(f"wheel: kernels for {architecture} not tried: there is no {emulator[0]}", flush=True)
        return
    source, program = work / "open.cpp", work / f"open-{architecture}"
    source.write_text(OPEN)
    run(platform_wheel.compiler_for(architecture, work), source, "-o", program)
    libraries = ["-L", f"/usr/{architecture}-linux-gnu"] if emulator else []
    said = run(*emulator, *libraries, program, *paths).split()
    if said != wanted:
        raise SystemExit(f"wheel: kernels say {said} in libraries of {wanted}")


def check_age(wheel: Path) -> None:
    """Check for an old C library, for which Zig links, so that wheels run on more machines."""
    major, minor = re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)[0]
    if (int(major), int(minor)) > platform_wheel.LINKED_FOR:
        raise SystemExit(f"wheel: {wheel.name} is not for glibc {platform_wheel.LINKED_FOR}")


def install(wheel: Path, venv: Path, extras: str = "") -> None:
    setup = ROOT / "scripts" / "setup_env.py"
    run(sys.executable, setup, "--venv", venv, "--wheel", wheel, "--extras", extras)


def check_light(wheel: Path, work: Path) -> None:
    venv, empty = work / "light", work / "empty"
    install(wheel, venv)
    run(venv / "bin" / "python", "-I", "-c", LIGHT, cwd=empty)
    version = run(venv / "bin" / "rootlace", "--version", cwd=empty)
    if wheel.name.split("-")[1] not in version:
        raise SystemExit(f"wheel: rootlace --version says {version!r}")


def check_runtime(wheel: Path, work: Path) -> None:
    venv, empty = work / "runtime", work / "empty"
    install(wheel, venv, "runtime")
    # A file, not -c: errors of programs read the source to name a line.
    program = work / "program.py"
    program.write_text(PROGRAM)
    print(run(venv / "bin" / "python", "-I", program, cwd=empty).strip())
    # Without a compiler, and without kernels compiled before.
    alone = {"PATH": str(venv / "bin"), "XDG_CACHE_HOME": str(work / "cache")}
    report = json.loads(run(venv / "bin" / "rootlace", "doctor", "--json", cwd=empty, env=alone))
    kernels = report["kernels"]
    print(f"wheel: kernels are {kernels}", flush=True)
    if platform.machine() in ARCHITECTURES and not (kernels["prebuilt"] or report["gpu"]):
        raise SystemExit("wheel: without a compiler the native kernels are not found")


def announce(wheel: Path) -> None:
    print(f"wheel: {wheel.name} ({wheel.stat().st_size / 2**20:.1f} MiB)", flush=True)


def is_own(architecture: str) -> bool:
    return architecture == platform.machine()


def with_kernels(plain: Path, architecture: str, work: Path) -> Path:
    """Make and check an architecture's wheel; return `plain` without a compiler for it."""
    compiler = platform_wheel.compiler_for(architecture, work)
    if find_compiler(compiler) is None:
        print(f"wheel: none for {architecture}: there is no {compiler}", flush=True)
        return plain
    made = platform_wheel.make(plain, architecture, work)
    check_contents(made)
    if platform_wheel.is_zig(compiler):
        check_age(made)
    check_kernels(made, architecture, work)
    announce(made)
    return made


def timed(name: str, check: Callable[[Path, Path], None], wheel: Path, work: Path) -> None:
    start = time.monotonic()
    check(wheel, work)
    print(f"wheel: {name} works ({time.monotonic() - start:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build the wheel and try it in fresh environments."
    )
    parser.add_argument("--into", type=Path, help="copy the wheels into this folder")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it behind")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or stack.enter_context(tempfile.TemporaryDirectory())
        work = Path(folder).resolve()
        (work / "empty").mkdir(parents=True, exist_ok=True)
        wheel = plain = build(work)
        check_contents(plain)
        announce(plain)
        for architecture in filter(is_own, ARCHITECTURES):
            wheel = with_kernels(plain, architecture, work)
        # Two at a time: an installation keeps one core busy.
        with ThreadPoolExecutor(2) as pool:
            tasks: list[Future[Any]] = [
                pool.submit(timed, "runtime", check_runtime, wheel, work),
                *(
                    pool.submit(with_kernels, plain, architecture, work)
                    for architecture in itertools.filterfalse(is_own, ARCHITECTURES)
                ),
                pool.submit(timed, "light client", check_light, wheel, work),
            ]
            for task in tasks:
                task.result()
        if arguments.into is not None:
            arguments.into.mkdir(parents=True, exist_ok=True)
            for made in work.glob("*.whl"):
                shutil.copy(made, arguments.into)


if __name__ == "__main__":
    main()
