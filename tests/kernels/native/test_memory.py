"""Memory in huge pages: where it begins, how long it lives, what happens where there is none."""

import gc
import mmap
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rootlace.kernels.arrays import as_array, as_tensor, numpy_dtype
from rootlace.kernels.native.machine import HUGE_PAGE, mapped

MIB = 1 << 20
STATM = Path("/proc/self/statm")
PAGEMAP = Path("/proc/self/pagemap")


@pytest.mark.parametrize("size", [0, 1, 4097, HUGE_PAGE, HUGE_PAGE + 1])
def test_is_zero_and_aligned(size: int) -> None:
    memory = mapped(size)
    assert memory.dtype == np.uint8 and memory.shape == (size,)
    assert size == 0 or memory.ctypes.data % HUGE_PAGE == 0
    assert not memory.any()
    memory.fill(255)  # all of it may be written
    assert int(memory.sum(dtype=np.int64)) == 255 * size


def test_takes_numbers_of_any_kind() -> None:
    for kind in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        dtype = np.dtype(kind)
        array = mapped(24 * dtype.itemsize).view(dtype).reshape(2, 3, 4)
        assert array.flags.c_contiguous and array.dtype == dtype
        tensor = as_tensor(array)
        array[1, 2, 3] = 1.5
        assert numpy_dtype(tensor.dtype) == dtype and float(tensor[1, 2, 3]) == 1.5
        assert as_array(tensor).ctypes.data == array.ctypes.data == tensor.data_ptr()


def _pages() -> int:
    """Count the pages of this process's address space."""
    return int(STATM.read_text().split()[0])


@pytest.mark.skipif(not STATM.exists(), reason="asks Linux how much memory is mapped")
def test_lives_as_long_as_a_view_of_it() -> None:
    size = 512 * MIB  # never touched
    pages = size // mmap.PAGESIZE
    gc.collect()
    before = _pages()
    memory = mapped(size)
    memory[5] = 7
    view = memory[:64].view(np.int32)
    del memory
    gc.collect()
    assert _pages() - before >= pages and view[1] == 7 << 8
    del view
    gc.collect()
    assert _pages() - before < pages


def test_no_room_is_an_error() -> None:
    with pytest.raises(OSError, match="memory"):
        mapped(1 << 60)


def test_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("rootlace.kernels.native.machine.mmap.mmap", Refusing)
    assert mapped(100).shape == (100,)
    monkeypatch.undo()
    monkeypatch.delattr("rootlace.kernels.native.machine.mmap.MADV_HUGEPAGE", raising=False)
    assert mapped(100).shape == (100,)


@pytest.mark.slow
def test_is_given_back_when_the_program_ends() -> None:
    """Modules, tensors and memory may end in any order: nothing is printed and nothing crashes."""
    program = (
        "import numpy as np\n"
        "from rootlace.kernels.native.machine import mapped\n"
        f"kept = [mapped({3 * MIB}).view(np.float32) for _ in range(3)]\n"
        "kept.append(kept)\n"
        "kept[0].fill(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not PAGEMAP.exists(), reason="asks Linux which pages are in main memory")
def test_parts_begin_with_small_pages() -> None:
    """A byte at the beginning of each part commits one small page of each part, not a huge one."""
    size, parts = 64 * HUGE_PAGE, 7
    memory = mapped(size, parts)
    for part in range(parts):
        memory[part * size // parts] = 1
    assert _resident(memory) == parts * mmap.PAGESIZE
    memory[-1] = 1
    assert _resident(memory) <= parts * mmap.PAGESIZE + HUGE_PAGE


def _resident(memory: np.ndarray) -> int:
    """Bytes of the pages of `memory` in main memory; a neighbour may share its line in smaps."""
    first, count = memory.ctypes.data // mmap.PAGESIZE, memory.size // mmap.PAGESIZE
    with PAGEMAP.open("rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * count), np.int64)
    return int((entries < 0).sum()) * mmap.PAGESIZE  # bit 63: present
