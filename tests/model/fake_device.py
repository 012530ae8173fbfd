"""A device that is the CPU: everything of the executor but streams and real graphs runs on it.

Host memory is garbage where nobody wrote, and copies from it are counted.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeEvent:
    """Event that is pending from `record` until a wait for it."""

    def __init__(self) -> None:
        self.pending = False
        self.waits = 0

    def record(self) -> None:
        self.pending = True

    def synchronize(self) -> None:
        self.pending = False
        self.waits += 1


class FakeDevice:
    """Graphs are the work itself, done again."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.events: list[FakeEvent] = []
        self.captures = 0

    def work(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers.append(torch.full((nbytes,), 0x7B, dtype=torch.uint8))
        return self.buffers[-1]

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        return work

    def works(self) -> bool:
        return True


class RecordingDevice(FakeDevice):
    """Graphs as CUDA's are: the operations on tensors that `work` did, on the same memory, with the
    same numbers in their arguments; none of the Python around them. Raises RuntimeError where the
    host looks at a tensor."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        recorder = _Recorder()
        with recorder:
            work()
        recorder.undo()
        return recorder.replay


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default or "nonzero" in str(func):
            raise RuntimeError(f"{func} makes the host wait: not permitted while capturing")
        if func._schema.is_mutable:
            # Only what is written to: weights may lie in files that are mapped to be read.
            named = {
                one.name: value for one, value in zip(func._schema.arguments, args, strict=False)
            }
            named |= kwargs
            written = [
                named[one.name]
                for one in func._schema.arguments
                if one.name in named and one.alias_info and one.alias_info.is_write
            ]
            for leaf in tree_leaves(written):
                if _is_tensor(leaf) and _storage(leaf) not in self._before:
                    storage = leaf.untyped_storage()
                    self._before[_storage(leaf)] = (storage, storage.clone())
        out = func(*args, **kwargs)
        mine = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        results = [leaf for leaf in tree_leaves(out) if _is_tensor(leaf)]
        if func._schema.is_mutable:
            self._calls.append((func, args, kwargs, []))
        elif not any(_storage(result) in mine for result in results):  # otherwise it is a view
            self._calls.append((func, args, kwargs, results))
        return out

    def undo(self) -> None:
        """Undo a capture: capturing runs nothing, so nothing has happened."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, results in self._calls:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if _is_tensor(leaf)]
            for old, new in zip(results, again, strict=False):
                old.copy_(new)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
