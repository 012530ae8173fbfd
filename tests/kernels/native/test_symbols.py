"""Libraries for several kinds of processor in one process: each uses its own code and tables."""

import re
import shutil
import subprocess
import sys

import pytest

from rootlace.kernels.native.library import FUNCTIONS
from tests.conftest import ROOT
from tests.native import NATIVE, PLAIN, TARGETS, library_for

STANDARD_LIBRARY = re.compile("_Z(N|NK|T[ISV]N|TSN)?St")
"""Names of the standard library. Its instantiated templates are weak symbols: a library uses its
own."""

ATTEND = """
import sys
import torch
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.library import open_library
from tests.kernels.cases import AttentionCase, exact_attention, make_attention, relative_error
from tests.kernels.native.layouts import attend, laid_out

# 65 keys: the second key block is a part of one.
rows = ((1, 65), (16, 16))
cases = [AttentionCase(rows, 16, (4, 2), 64, t) for t in (torch.float32, torch.bfloat16)]
libraries = [open_library(path) for path in sys.argv[1:]]
for library in libraries:
    team = Team(library, 1)
    for case in cases:
        it = make_attention(case, torch.device("cpu"))
        cache = laid_out(it.k_cache, it.v_cache)
        out = attend(library, team.handle, it.q, *cache, it.batch, scale=case.scale)
        assert relative_error(out, exact_attention(it)[0]) < 4e-3
    print(library.rl_instructions().decode())
"""


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_the_interface_is_seen(target: str) -> None:
    # The loader gives all libraries of a process the first one's of a unique symbol (kind "u").
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library_for(target)._name],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    symbols = [line.split()[1:] for line in listed.stdout.splitlines()]
    own = {(kind, name) for kind, name in symbols if not STANDARD_LIBRARY.match(name)}
    assert own == {("T", name) for name in FUNCTIONS}
    assert {kind for kind, _ in symbols} <= {"T", "W", "V"}


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_in_one_process(order: tuple[int, int]) -> None:
    libraries = [library_for(PLAIN), library_for(NATIVE)]
    paths = [libraries[index]._name for index in order]
    done = subprocess.run(
        [sys.executable, "-c", ATTEND, *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    names = [libraries[index].rl_instructions().decode() for index in order]
    assert done.stdout.split() == names
    assert "generic" in names
