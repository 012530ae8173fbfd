"""Setting a model up on a GPU, and the little that speaks to CUDA, with CUDA replaced."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.dispatch import with_reference
from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.executor import device_steps
from rootlace.runtime.model.executor import staging as cuda_layer
from rootlace.runtime.model.executor.device_steps import DeviceSteps, GpuModel, on_gpu
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.executor.staging import CudaDevice
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.executor.torch_setup import inputs_of
from rootlace.runtime.model.kv_pool import block_bytes
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from tests.model.chains import run_ahead, run_plain
from tests.model.checkpoints import configs, save
from tests.model.fake_device import FakeDevice
from tests.model.fixed_kernels import fixed_kernels
from tests.model.test_device_steps import PLAIN, rows
from tests.model.test_launched_steps import same

CPU = torch.device("cpu")
SIZE, CONTEXT = 4, 256
MAX_TOKENS, MAX_ROWS = 40, 6
MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> GpuModel:
    save(configs()["llama"], tmp_path)
    config = ModelConfig.read(tmp_path)
    kernels, _ = fixed_kernels(CONTEXT // SIZE)
    with torch.inference_mode():
        decoder = Decoder(config.spec, load_weights(config, torch.float32, CPU), kernels)
    setup = ModelSetup(config, ExecutorConfig(), CacheConfig(SIZE), FLOAT32)
    return GpuModel(setup, decoder, inputs_of(setup, kernels))


class Memory:
    """A device of `free` bytes, of which the trial steps take `used`."""

    def __init__(self, free: int, used: int) -> None:
        self.free, self.used = free, used
        self.trials = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def measured(run: Callable[[], None], device: torch.device) -> int:
            run()
            self.trials += 1
            return self.used

        monkeypatch.setattr(device_steps, "CudaDevice", lambda device: FakeDevice())
        monkeypatch.setattr(device_steps, "measured", measured)
        monkeypatch.setattr(device_steps, "free_memory", lambda device: (self.free, 2 * self.free))


@torch.inference_mode()
def set_up(
    model: GpuModel, executor: ExecutorConfig, cache: CacheConfig
) -> tuple[DeviceSteps, torch.Tensor]:
    setup = replace(model.setup, executor=executor, cache=cache)
    return on_gpu(replace(model, setup=setup), MAX_TOKENS, MAX_ROWS)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_pool_takes_what_trial_steps_leave(
    model: GpuModel, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    memory = Memory(free=400 * MIB, used=30 * MIB)
    memory.install(monkeypatch)
    executor = ExecutorConfig(cuda_graphs=graphs)
    steps, pool = set_up(model, executor, CacheConfig(block_size=SIZE))
    assert memory.trials == 1
    size = block_bytes(model.setup.config, SIZE, FLOAT32)
    assert 0.3 * memory.free < pool.shape[2] * size < memory.free - memory.used
    assert steps.graphs.enabled == graphs
    # The pool has one block more, which padding writes to.
    stored = pool.untyped_storage().nbytes()  # what `assert` would spell out byte by byte
    assert stored == (pool.shape[2] + 1) * size


def test_what_is_set_up_runs(model: GpuModel, monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(free=400 * MIB, used=30 * MIB).install(monkeypatch)
    steps, pool = set_up(model, ExecutorConfig(), CacheConfig(SIZE, 96))
    assert pool.shape[2] == 96
    plain = ModelRunner.load(
        ExecutorConfig(model=str(model.setup.config.path)), CacheConfig(SIZE, 96), 40, 6
    )
    same(run_ahead(steps, rows(3), PLAIN, 4), run_plain(plain, rows(3), PLAIN, 4))


def test_no_memory_is_said_so(model: GpuModel, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(free=30 * MIB, used=30 * MIB)
    memory.install(monkeypatch)
    with pytest.raises(UnsupportedModel, match="no memory for the KV cache"):
        set_up(model, ExecutorConfig(), CacheConfig(SIZE))

    def full(*_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device_steps.kv_pool, "allocate", full)
        with pytest.raises(InvalidRequest, match="lower max_step_tokens"):
            set_up(model, ExecutorConfig(), CacheConfig(SIZE))
        patch.setattr(device_steps, "measured", lambda run, device: 0)
        with pytest.raises(InvalidRequest, match="no memory for a KV cache of 7 blocks"):
            set_up(model, ExecutorConfig(), CacheConfig(SIZE, 7))


class Graph:
    """Records what is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def capture_begin(self, **options: Any) -> None:
        self.calls.append(options)

    def capture_end(self) -> None:
        self.calls.append("end")
        if "broken" in self.calls:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self.calls.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDevice, list[Graph]]:
    made: list[Graph] = []

    def graph() -> Graph:
        made.append(Graph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    pools = count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {next(pools)}")
    monkeypatch.setattr(cuda_layer.torch.cuda, "CUDAGraph", graph)
    # A build for CUDA has it, and takes no pool that is made up.
    ended = "_cuda_endAllocateToPool"
    monkeypatch.setattr(torch._C, ended, lambda *pool: None, raising=False)
    return CudaDevice(torch.device("cuda")), made


def test_graphs_are_captured_in_one_pool(cuda: tuple[CudaDevice, list[Graph]]) -> None:
    device, made = cuda
    done: list[int] = []
    replays = [device.capture(lambda: done.append(1)) for _ in range(2)]
    assert len(made) == 2 and len(done) == 2
    options = {"pool": "pool 0", "capture_error_mode": "thread_local"}
    for graph, replay in zip(made, replays, strict=True):
        assert graph.calls == [options, "end"]
        replay()
        assert graph.calls[-1] == "replay"


def test_a_capture_that_fails_is_ended(cuda: tuple[CudaDevice, list[Graph]]) -> None:
    device, made = cuda

    def work() -> None:
        made[-1].calls.append("broken")
        raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(work)
    assert made[-1].calls[-1] == "end"
    # What the allocator still thinks of the pool is nothing to the next graph.
    device.capture(lambda: None)
    pools = [graph.calls[0]["pool"] for graph in made]
    assert pools[0] != pools[1], "a pool whose capture failed is refused from then on"


def test_a_capture_that_cannot_be_ended_is_one_that_failed(
    cuda: tuple[CudaDevice, list[Graph]],
) -> None:
    device, made = cuda
    with pytest.raises(RuntimeError, match="invalidated"):
        device.capture(lambda: made[-1].calls.append("broken"))
    device.capture(lambda: None)()
    assert made[1].calls[0]["pool"] != made[0].calls[0]["pool"]


def test_a_device_with_a_fault_does_not_work(cuda: tuple[CudaDevice, list[Graph]]) -> None:
    class Stream:
        fault = False

        def synchronize(self) -> None:
            if self.fault:
                raise RuntimeError("CUDA error: device-side assert triggered")

    device, _ = cuda
    stream = device._stream = Stream()  # type: ignore[assignment]
    assert device.works()
    stream.fault = True
    assert not device.works()


def test_results_are_finite(model: GpuModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial steps run on memory that nobody wrote: what is measured must not depend on it."""
    Memory(free=400 * MIB, used=MIB).install(monkeypatch)
    found: list[np.ndarray] = []
    collect = DeviceSteps.collect

    def keep(self: DeviceSteps, step: Any) -> Any:
        result = collect(self, step)
        found.append(result.token_ids)
        return result

    monkeypatch.setattr(DeviceSteps, "collect", keep)
    set_up(model, ExecutorConfig(), CacheConfig(SIZE, 8))
    assert len(found) >= 5 and all((tokens >= 0).all() for tokens in found)


def test_attention_by_the_reference_leaves_no_step_to_capture(
    model: GpuModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(64 * MIB, 1 * MIB).install(monkeypatch)
    kernels = with_reference(model.inputs.kernels, ["attention"])
    reserve = replace(model, inputs=replace(model.inputs, kernels=kernels))
    for loaded, captures in ((model, True), (reserve, False)):
        steps, _ = set_up(loaded, ExecutorConfig(), CacheConfig(SIZE, 32))
        assert steps.prepare() is captures
