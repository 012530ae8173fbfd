"""What the bytes of cached blocks follow from, beside the tokens, where they outlive a process."""

from __future__ import annotations

import hashlib
from importlib.metadata import version

import torch

from rootlace.kernels.native import library as native
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.adapters.config import read_adapters
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.weight_cache.key import cache_key


def kv_identity(runner: ModelRunner, executor: ExecutorConfig, cache: CacheConfig) -> bytes:
    """32 bytes: configuration, weights, code and kernels of the model, the device, and how keys and
    values lie in a block. Raises OSError for a file that cannot be read."""
    config = runner.config
    device = runner.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = cache_key(
        config,
        Checkpoint(config.path, config.allow_pickle).files,
        native.load() if runner.kernels == "native" else None,
        runner.dtype,
        *(executor.quantize, executor.product_paths, executor.kv_dtype, runner.kernels, name),
        version("transformers") if config.spec.foreign is not None else "",
        *map(str, (cache.block_size, runner.context_length, tuple(runner.kv_cache.shape[3:]))),
    )
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


def adapter_contents(executor: ExecutorConfig) -> dict[str, bytes]:
    """For `kv_space`, of the adapters of an engine: one whose files change has other spaces. Raises
    OSError for a file that cannot be read."""
    contents = {}
    for adapter in read_adapters(executor.adapters):
        digest = hashlib.blake2b(digest_size=32)
        for file in sorted(adapter.folder.glob("adapter*")):
            digest.update(file.name.encode() + file.read_bytes())
        contents[adapter.name] = digest.digest()
    return contents
