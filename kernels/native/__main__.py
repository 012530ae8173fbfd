"""Command `python -m rootlace.kernels.native`: compile the native kernels for this machine now, for
a container image or before tests. Otherwise the first engine compiles them at its start."""

from __future__ import annotations

import sys

from rootlace.kernels.native.build import NativeUnavailable
from rootlace.kernels.native.library import load_best


def main() -> int:
    """Return 0 if native kernels are available now."""
    try:
        load_best(lambda what: print(f"{what} ...", flush=True), compile_here=True)
    except NativeUnavailable as error:
        print(f"no native kernels: {error}", file=sys.stderr)
        return 1
    print("native kernels: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
