"""What the ranks of a model tell each other, by `torch.distributed`.

Numbers of a step, hidden states, logits: tensors alone, nothing is pickled. Gloo carries what lies
in main memory, between loopback addresses; NCCL sums what lies on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from rootlace.runtime.contracts.plan import PooledRow, StepPlan
from rootlace.runtime.model.decoder.interface import wanted_tokens

# Message ------------------------------------------------------------------------------------------
#
# A step's plan as the numbers that the other ranks need of it, as safetensors writes them: those of
# the forward pass.
#
# Which token is sampled, and how, is rank 0's alone: a plan that is read back wants the same hidden
# states, and samples and scores nothing.


FIELDS: tuple[tuple[str, type[np.integer]], ...] = (
    ("token_ids", np.int32),
    ("positions", np.int32),
    ("slots", np.int64),
    ("row_start", np.int32),
    ("context_len", np.int32),
    ("block_tables", np.int32),
    ("copies", np.int32),
    ("duplicate_tokens", np.int32),
    ("duplicate_slots", np.int64),
    ("adapters", np.int32),
)
"""Arrays of a plan that the message has."""
WANTED = "wanted"
"""The array of the tokens whose hidden states are wanted."""


def encode(plan: StepPlan, block_size: int) -> np.ndarray:
    """uint8 [n]. Of the block tables as much as any row uses."""
    used = -(-int(plan.context_len.max(initial=0)) // block_size)
    arrays = {name: np.asarray(getattr(plan, name), kind) for name, kind in FIELDS}
    arrays["block_tables"] = np.ascontiguousarray(arrays["block_tables"][:, :used])
    arrays[WANTED] = wanted_tokens(plan)
    return np.frombuffer(bytearray(save(arrays)), np.uint8)


def decode(numbers: np.ndarray) -> StepPlan:
    """The plan that was encoded, as far as `Forward.run` reads it."""
    arrays: dict[str, Any] = load(numbers.tobytes())
    wanted = arrays.pop(WANTED).tolist()
    return StepPlan(step=0, **arrays, pooled=[PooledRow(token, 1) for token in wanted])


# Group --------------------------------------------------------------------------------------------


# Its stubs lack most of what is used here: groups by themselves, and no default group of a process.
distributed: Any = torch.distributed

WAIT = timedelta(days=365)
"""Other ranks wait for rank 0, their parent, as long as it takes: they end with it."""
FIRST_WAIT = timedelta(seconds=300)
"""Rank 0 waits so long for one that hangs in the middle of a step. One that has died closes its
connections, which ends the waiting of all others at once."""
GPU_WAIT = timedelta(seconds=60)
"""A sum on GPUs waits in the middle of a step alone. NCCL ends the process behind it."""
LOOPBACK = "127.0.0.1"


class Group:
    """All ranks of a model, as one of them sees them. All call the same methods in the same order,
    with tensors of the same shapes. They meet by a file at `path` that only their user may read,
    and which is not there yet."""

    def __init__(
        self,
        path: Path,
        rank: int,
        count: int,
        device: torch.device,
        loaded: Callable[[], None],
    ) -> None:
        """`loaded` is called before others are waited for."""
        self.rank, self.count = rank, count
        self._path, self._device, self._loaded = path, device, loaded
        self._host: Any = None
        self._gpus: Any = None

    def agree(self, blocks: int) -> int:
        """Meet all others; the least number of blocks that any of them has room for."""
        self._loaded()
        self._meet()
        return min(int(one) for one in self._all(torch.tensor([blocks])))

    def _meet(self) -> None:
        rank, count = self.rank, self.count
        store = distributed.FileStore(str(self._path), count)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = WAIT if rank else FIRST_WAIT
        store.set_timeout(options._timeout)
        self._host = distributed.ProcessGroupGloo(store, rank, count, options)
        if self._device.type == "cuda":
            nccl = distributed.ProcessGroupNCCL.Options()
            nccl._timeout = GPU_WAIT
            gpu_store = distributed.PrefixStore("gpus", store)
            self._gpus = distributed.ProcessGroupNCCL(gpu_store, rank, count, nccl)

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts. Between CPUs it is made in float32 at least, in the order of
        the ranks, and rounded once: so an element's bits depend on no other element, and on no
        message's size. Between GPUs NCCL's order may depend on the size."""
        if self._gpus is not None:
            part = part.contiguous()
            self._gpus.allreduce([part]).wait()
            return part
        parts = self._all(part)
        wide = parts[0].to(torch.promote_types(part.dtype, torch.float32))
        for other in parts[1:]:
            wide = wide + other
        return wide.to(part.dtype)

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor on every rank."""
        group, tensor = self._gpus or self._host, tensor.contiguous()
        group.broadcast([_bytes(tensor)], self._first()).wait()
        return tensor

    def gathered(self, part: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 what all ranks have, in main memory, of the same shapes; elsewhere nothing."""
        part = part.cpu().contiguous()
        options = distributed.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(part) for _ in range(self.count)] if self.rank == 0 else []
        into = [[_bytes(one) for one in parts]] if self.rank == 0 else []
        self._host.gather(into, [_bytes(part)], options).wait()
        return parts

    def say(self, kind: int, numbers: np.ndarray) -> None:
        """Rank 0: have all others `hear` uint8 [n] of some kind."""
        head = torch.tensor([kind, len(numbers)])
        self._host.broadcast([head], self._first()).wait()
        if len(numbers):
            self._host.broadcast([torch.from_numpy(numbers)], self._first()).wait()

    def hear(self) -> tuple[int, np.ndarray]:
        """Wait for what rank 0 says next: its kind, and uint8 [n]."""
        head = torch.empty(2, dtype=torch.int64)
        self._host.broadcast([head], self._first()).wait()
        kind, length = head.tolist()
        numbers = torch.empty(length, dtype=torch.uint8)
        if length:
            self._host.broadcast([numbers], self._first()).wait()
        return kind, numbers.numpy()

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.count)]
        self._host.allgather([[_bytes(one) for one in parts]], [_bytes(part)]).wait()
        return parts

    def _first(self) -> Any:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        return options


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Any type as bytes, a flat view of its memory."""
    return tensor.view(-1).view(torch.uint8)
