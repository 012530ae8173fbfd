"""Exchange tensors among the ranks of a model, by `torch.distributed`.

Tensors alone are sent (numbers of a step, hidden states, logits), and nothing is pickled. Gloo
carries tensors in main memory, between loopback addresses; NCCL sums tensors on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rootlace.runtime.contracts.messages import decode_arrays, encode_arrays
from rootlace.runtime.contracts.plan import PooledRow, StepPlan
from rootlace.runtime.model.decoder.interface import wanted_tokens

# Message ------------------------------------------------------------------------------------------
#
# Encode a step's plan for the other ranks: the arrays of the forward pass.
#
# Rank 0 alone samples: a decoded plan wants the same hidden
# states, and neither samples nor scores.


FIELDS = (
    *("token_ids", "positions", "slots", "row_start", "context_len", "block_tables", "copies"),
    *("duplicate_tokens", "duplicate_slots", "adapters"),
)
"""Arrays of a plan that a forward pass reads."""


def encode(plan: StepPlan, block_size: int) -> np.ndarray:
    """Encode a plan, uint8 [n]. Block tables are cut to the longest used row."""
    used = -(-int(plan.context_len.max(initial=0)) // block_size)
    arrays = {name: getattr(plan, name) for name in FIELDS}
    arrays["block_tables"] = plan.block_tables[:, :used]
    wanted = wanted_tokens(plan).astype(np.int32)
    # A copy: torch warns of memory that it may not write to.
    return np.frombuffer(encode_arrays({**arrays, "wanted": wanted}), np.uint8).copy()


def decode(numbers: np.ndarray) -> StepPlan:
    """Decode a plan, as far as `Forward.run` reads it."""
    arrays: dict[str, Any] = decode_arrays(numbers.data)
    wanted = arrays.pop("wanted").tolist()
    return StepPlan(step=0, **arrays, pooled=[PooledRow(token, 1) for token in wanted])


# Group --------------------------------------------------------------------------------------------


# The stubs lack most names used here: groups without a process's default group.
distributed: Any = torch.distributed

WAIT = timedelta(days=365)
"""Wait of other ranks for rank 0, their parent, as long as needed: they end with rank 0."""
FIRST_WAIT = timedelta(seconds=300)
"""Wait of rank 0 for a rank that hangs in the middle of a step. A rank that died closes its
connections, which ends the wait of all others at once."""
GPU_WAIT = timedelta(seconds=60)
"""Wait for a sum on GPUs, in the middle of a step. After this time NCCL ends the process."""
LOOPBACK = "127.0.0.1"


class Group:
    """Group of all ranks of a model, from one rank's side. All ranks call the same methods in the
    same order, with tensors of the same shapes. Ranks meet by a new file at `path`, which only
    their user may read."""

    def __init__(
        self, path: Path, rank: int, count: int, device: torch.device, loaded: Callable[[], None]
    ) -> None:
        """`loaded` is called before the wait for others."""
        self.rank, self.count = rank, count
        self._path, self._device, self._loaded = path, device, loaded
        self._host: Any = None
        self._gpus: Any = None

    def agree(self, blocks: int) -> int:
        """Meet all other ranks; return the least number of blocks that any rank has room for."""
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
        """Return the sum of all ranks' parts. On CPUs the sum is made in float32 at least, in the
        order of the ranks, and rounded once. So an element's bits depend on no other element, and
        on no message's size. On GPUs NCCL's order may depend on the size."""
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
        """Return all ranks' tensors, equal in shape, in main memory on rank 0; elsewhere none."""
        part = part.cpu().contiguous()
        options = distributed.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(part) for _ in range(self.count)] if self.rank == 0 else []
        into = [[_bytes(one) for one in parts]] if self.rank == 0 else []
        self._host.gather(into, [_bytes(part)], options).wait()
        return parts

    def say(self, kind: int, numbers: np.ndarray) -> None:
        """Send uint8 [n] of some kind from rank 0; all other ranks `hear` it."""
        head = torch.tensor([kind, len(numbers)])
        self._host.broadcast([head], self._first()).wait()
        if len(numbers):
            self._host.broadcast([torch.from_numpy(numbers)], self._first()).wait()

    def hear(self) -> tuple[int, np.ndarray]:
        """Wait for rank 0's next message: return its kind, and uint8 [n]."""
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
    """View any type as flat bytes."""
    return tensor.view(-1).view(torch.uint8)
