"""Fuzz readers of bytes: `make fuzz MINUTES=5 [READERS="wire gguf"]`.

Atheris changes the inputs of `tests/corpora` so that they reach more and more of a reader's code;
JSON and MessagePack mostly stay such (`fuzz_mutator.py`). Small inputs that reach more code than
the corpus are added to it. An input on which a reader raises anything but a typed error, hangs or
takes too much memory is left in `build/fuzz/READER-…`, and the script ends with 1. Fix the reader
and move the file into the corpus.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzz_mutator import CODECS, Mutator

ROOT = Path(__file__).resolve().parent.parent
CORPORA = ROOT / "tests" / "corpora"
CHILD = "child"
MAX_BYTES = 2048
"""Larger inputs are not kept."""
MAX_KEPT = 40
"""Inputs that one run adds, the smallest ones first."""
LIMITS = ("-timeout=20", "-rss_limit_mb=4096", f"-max_len={MAX_BYTES}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", help="of tests/corpora; without any, all")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each reader")
    args = parser.parse_args()
    known = sorted(
        path.name for path in CORPORA.iterdir() if path.is_dir() and "_" not in path.name
    )
    if unknown := set(args.readers) - set(known):
        parser.error(f"there is no reader {', '.join(unknown)}; there are {', '.join(known)}")
    failed = [name for name in args.readers or known if not _explore(name, args.minutes)]
    if failed:
        print(f"see build/fuzz: {', '.join(failed)}")
    return bool(failed)


def _explore(name: str, minutes: float) -> bool:
    """Return whether nothing was found. libFuzzer ends its process, so each reader has its own."""
    found = ROOT / "build" / "fuzz" / name
    found.mkdir(parents=True, exist_ok=True)
    print(f"== {name}, {minutes:g} minutes", flush=True)
    time = f"-max_total_time={int(60 * minutes)}"
    artifacts = f"-artifact_prefix={found.parent}/{name}-"
    done = _child(name, str(found), str(CORPORA / name), time, artifacts, "-print_final_stats=1")
    merged = found.parent / f"{name}-merged"
    shutil.rmtree(merged, ignore_errors=True)
    shutil.copytree(CORPORA / name, merged)
    before = {path.name for path in merged.iterdir()}
    # Without counters: how often a line ran is no reason to keep an input.
    _child(name, str(merged), str(found), "-merge=1", "-use_counters=0")
    new = [path for path in merged.iterdir() if path.name not in before]
    for path in sorted(new, key=lambda path: path.stat().st_size)[:MAX_KEPT]:
        shutil.copy(path, CORPORA / name / path.name[:16])
    print(f"== {name}: {len(new)} inputs reach more than the corpus did", flush=True)
    return done == 0


def _child(name: str, *flags: str) -> int:
    command = [sys.executable, "-m", "scripts.fuzz", CHILD, name, *flags, *LIMITS]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def _fuzz(name: str, flags: list[str]) -> None:
    """Does not return."""
    try:
        import atheris
    except ImportError as error:
        raise SystemExit("pip install atheris, or: make fuzz") from error
    with atheris.instrument_imports(include=["rootlace"]):
        from tests.corpora import readers
    # To merge, libFuzzer restarts itself by a shell, which reads its first argument's words.
    again = shlex.join([sys.executable, "-m", "scripts.fuzz", CHILD, name])
    options = {}
    if name in CODECS:
        corpus = [path.read_bytes() for path in readers.inputs(name)]
        # `Fuzz` replaces `Mutate`: the inherited one would end the process.
        mutate = lambda data, size: atheris.Mutate(data, size)  # noqa: E731
        options["custom_mutator"] = Mutator(name, corpus, mutate)
    atheris.Setup([again, *flags], lambda data: readers.attempt(name, data), **options)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        _fuzz(sys.argv[2], sys.argv[3:])
    sys.exit(main())
