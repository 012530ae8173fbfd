"""Runner whose steps are a device's, with the CPU as the device."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.automaton_table import arena_for
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.decoder.interface import StepInputBuilder
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.executor.device_steps import DeviceSteps
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.executor.staging import Graphs
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.kv_pool import allocate
from rootlace.runtime.model.lora import load_adapter
from rootlace.runtime.model.options import read_adapters
from rootlace.runtime.model.sampler import Sampler
from tests.model.fake_device import FakeDevice

CPU = torch.device("cpu")


def stands_still() -> float:
    """A clock by which capturing is always within its share of the time."""
    return 0.0


@torch.inference_mode()
def device_runner(
    folder: Path,
    device: FakeDevice,
    kernels: KernelSet,
    *,
    blocks: int,
    block_size: int,
    max_rows: int,
    context_length: int | None = None,
    graphs: bool = True,
    clock: Callable[[], float] = stands_still,
    adapters: Sequence[str] = (),
) -> ModelRunner:
    """Load a runner in float32, with a pool of NaN."""
    config = ModelConfig.read(folder)
    vocab_size = config.spec.vocab_size
    executor = ExecutorConfig(str(folder), context_length=context_length)
    setup = ModelSetup(config, executor, CacheConfig(block_size, blocks), FLOAT32)
    rotary = setup.rotary
    pool = torch.from_numpy(allocate(config, blocks + 1, block_size, FLOAT32))
    pool.fill_(float("nan"))
    loaded = [load_adapter(one, config.spec, torch.float32, CPU) for one in read_adapters(adapters)]
    weights = load_weights(config, torch.float32, CPU).resident()
    decoder = Decoder(config.spec, weights, kernels, adapters=loaded)
    steps = DeviceSteps(
        device,
        decoder,
        StepInputBuilder(config.spec, kernels, rotary, block_size, torch.float32, CPU),
        pool,
        Sampler(vocab_size, kernels, arena_for(vocab_size, max_rows, CPU, 1 << 20)),
        Graphs(device, graphs, 64, clock),
        max_rows=max_rows,
        max_blocks=-(-rotary.context_length // block_size),
        scratch_block=blocks,
    )
    names = tuple(one.name for one in loaded)
    return ModelRunner(setup, steps, pool[:, :, :blocks], kernels.name, names)
