"""Map the weight files of a model, and check that they have the tensors of its decoder. Torch is
imported for torch's own files alone: a start from packed weights needs none."""

from __future__ import annotations

import json
import logging
import math
import mmap
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import msgspec
import numpy as np
from msgspec.structs import replace

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.quantised.layouts import FLOATS, Expected, Shape, Storage
from rootlace.runtime.model.checkpoint.source import INDEX, PICKLED, SINGLE, index_files, stored_in
from rootlace.runtime.model.checkpoint.weights import Part, layer_parts
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames
from rootlace.runtime.model.gguf.file import GgufFile
from rootlace.wire.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch

# Pickled ------------------------------------------------------------------------------------------
#
# Read the tensors of a file that torch.save wrote.


def read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a torch file by name, memory-mapped. Unpickling makes nothing but
    tensors. Raises `UnsupportedModel`."""
    import torch  # only here: other files need no torch

    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UnsupportedModel(f"{file}: the file is missing") from None
    except pickle.UnpicklingError as error:  # torch's message tells how to let the file run code
        raise UnsupportedModel(f"{file}: damaged, or it has more than tensors") from error
    except Exception as error:  # any other effect of a damaged file
        why = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(f"{file}: it cannot be read: {why}") from error
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{file}: not a dictionary of tensors")
    for name, tensor in found.items():
        dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not dense:
            raise UnsupportedModel(f"{file}: {name!s:.99} is not a dense tensor")
    return {name: tensor.detach() for name, tensor in found.items()}


# Files --------------------------------------------------------------------------------------------


_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}


class _TensorPlace(msgspec.Struct, frozen=True):
    """Place of a tensor in a file. `blocks`: number and size in bytes of the blocks of a row, in a
    GGUF file; None: the tensor has plain numbers."""

    file: str
    dtype: str
    shape: Shape
    begin: int
    blocks: tuple[int, int] | None = None

    @property
    def stored(self) -> tuple[np.dtype[Any], Shape]:
        """Type and shape of an array over the file's bytes."""
        if self.blocks is None:
            return _DTYPES[self.dtype], self.shape
        return np.dtype(np.uint8), (*self.shape[:-1], *self.blocks)


class Checkpoint:
    """Weight files of a model: safetensors files of a folder, or a GGUF file with all parts, mapped
    read-only. Torch maps torch's files, if allowed and if no other files exist.

    A file may be larger than the machine's memory: the system reserves memory for a writable
    mapping, and none for a read-only one. A file stays mapped as long as this object or one of its
    tensors lives. Meanwhile a file may be replaced or deleted, but not be written to: tensors would
    change, or the process would end.
    """

    def __init__(self, path: Path, allow_pickle: bool = False) -> None:
        """Map the folder or GGUF file `path`."""
        self._path = path
        self._folder = path.parent if path.is_file() else path
        self._files: dict[str, mmap.mmap | None] = {}
        self._pickled: dict[str, torch.Tensor] = {}
        self._places: dict[str, _TensorPlace] = {}
        if path.is_file():
            self._open_gguf(path)
        else:
            self._open_folder(allow_pickle)
        self.types: Mapping[str, str] = {n: place.dtype for n, place in self._places.items()}
        """Type of every stored tensor, as safetensors or GGUF names types."""

    @property
    def files(self) -> list[Path]:
        return [self._folder / name for name in self._files]

    def expect(
        self, expected: Mapping[str, Expected], ignored: Callable[[str], bool], remark: str = ""
    ) -> None:
        """Check names, shapes and types against the architecture's. `remark` ends the message about
        names that differ. Raises `UnsupportedModel`."""
        missing = sorted(expected.keys() - self._places.keys())
        if missing:
            raise UnsupportedModel(f"{self._path}: weights are missing: {_some(missing)}{remark}")
        extra = sorted(name for name in self._places.keys() - expected.keys() if not ignored(name))
        if extra:
            raise UnsupportedModel(
                f"{self._path}: weights that the architecture does not have: {_some(extra)}{remark}"
            )
        for name, what in expected.items():
            place = self._places[name]
            if place.shape not in what.shapes:
                shapes = " or ".join(str(list(shape)) for shape in what.shapes)
                raise UnsupportedModel(
                    f"{self._folder / place.file}: {name} has shape {list(place.shape)}, "
                    f"expected {shapes}"
                )
            self._place(name, what.types)

    def tensor(self, name: str, types: frozenset[str] = FLOATS) -> torch.Tensor:
        """Return `array` as a tensor."""
        from rootlace.kernels.arrays import as_tensor  # only here: others need no torch

        return as_tensor(self.array(name, types))

    def array(self, name: str, types: frozenset[str] = FLOATS) -> np.ndarray:
        """Return the stored tensor, backed by the mapped file; writing to the array ends the
        process. GGUF's blocks are bytes [..., blocks, bytes of one]. Raises `UnsupportedModel`."""
        if name not in self._places:
            raise UnsupportedModel(f"{self._path}: weights are missing: {name}")
        place = self._place(name, types)
        if name in self._pickled:
            from rootlace.kernels.arrays import as_array

            return as_array(self._pickled[name])
        dtype, shape = place.stored
        memory, count = self._files[place.file], math.prod(shape)
        assert memory is not None
        if not count:  # a buffer must not be empty
            return np.empty(shape, dtype)
        if place.begin % dtype.itemsize:  # kernels may expect aligned numbers
            end = place.begin + count * dtype.itemsize
            return np.frombuffer(bytearray(memory[place.begin : end]), dtype).reshape(shape)
        return np.frombuffer(memory, dtype, count, place.begin).reshape(shape)

    def num_bytes(self, name: str, itemsize: int | None = None) -> int:
        """Return a tensor's size in bytes, with `itemsize` bytes a number; None: as in the file."""
        dtype, shape = self._places[name].stored
        return math.prod(shape) * (itemsize or dtype.itemsize)

    def release(self, name: str) -> None:
        """Release the memory of a tensor's pages; the system reads the pages again when needed."""
        place = self._places[name]
        end = place.begin + self.num_bytes(name)
        begin = -(-place.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - begin
        memory = self._files[place.file]
        if memory is not None and length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED, begin, length)

    def _place(self, name: str, types: frozenset[str]) -> _TensorPlace:
        place = self._places[name]
        if place.dtype not in types:
            raise UnsupportedModel(
                f"{self._folder / place.file}: {name} has type {place.dtype}, expected "
                f"{' or '.join(sorted(types))}"
            )
        return place

    def _open_folder(self, allow_pickle: bool) -> None:
        first = stored_in(self._folder, allow_pickle)
        if first is None:
            raise UnsupportedModel(f"{self._folder}: neither {SINGLE} nor {INDEX} is there")
        opened = self._open_pickled if first in PICKLED else self._open
        whole = first in (SINGLE, PICKLED[0])
        for name in [first] if whole else index_files(self._folder / first):
            opened(name)

    def _open(self, name: str) -> None:
        # Only here: a GGUF file needs no safetensors.
        from safetensors import SafetensorError, safe_open

        file = self._folder / name
        try:
            # The library checks that the header is sound and fits the file.
            with safe_open(file, framework="numpy"):
                pass
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
                self._files[name] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise UnsupportedModel(f"{file}: the file is missing") from None
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{file}: {error}") from error
        header.pop("__metadata__", None)
        for weight, entry in header.items():
            begin = 8 + size + entry["data_offsets"][0]
            self._add(weight, _TensorPlace(name, entry["dtype"], tuple(entry["shape"]), begin))

    def _add(self, weight: str, place: _TensorPlace) -> None:
        """Add a weight's place. Refuse a weight in two files: nothing says which one counts."""
        known = self._places.setdefault(weight, place)
        if known is not place:
            raise UnsupportedModel(
                f"{self._folder}: {weight} is in {known.file} and in {place.file}, too"
            )

    def _open_pickled(self, name: str) -> None:
        from rootlace.kernels.arrays import torch_dtype

        self._files[name] = None
        for weight, tensor in read_pickled(self._folder / name).items():
            kind = next((n for n, one in _DTYPES.items() if torch_dtype(one) == tensor.dtype), None)
            shape = tuple(tensor.shape)
            self._add(weight, _TensorPlace(name, kind or str(tensor.dtype), shape, 0))
            self._pickled[weight] = tensor

    def _open_gguf(self, path: Path) -> None:
        for name, tensor in GgufFile.read(path).tensors.items():
            kind, file = tensor.type, tensor.file.name
            blocks = (tensor.shape[-1] // kind.numbers, kind.bytes)
            whole = None if kind.name in FLOATS else blocks
            self._files[file] = tensor.mapping
            self._places[name] = _TensorPlace(file, kind.name, tensor.shape, tensor.begin, whole)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# Opening ------------------------------------------------------------------------------------------
#
# Open a checkpoint: check that its files have the tensors of the model's decoder.


Progress = Callable[[str, float], None]
"""Callback of a reading: the name of the part being read, and the fraction already read."""

AT_ONCE = 4096
"""Number of rows compared at a time: NumPy takes a byte for each number compared."""
KV_SCALES = {
    "k": ("self_attn.k_proj.k_scale", "self_attn.k_scale", "self_attn.attn.k_scale"),
    "v": ("self_attn.v_proj.v_scale", "self_attn.v_scale", "self_attn.attn.v_scale"),
}
"""Names of a layer's scales of an fp8 KV cache."""
KV_SCALE = "self_attn.kv_scale"
"""Name in old checkpoints: one scale for keys and values."""

log = logging.getLogger(__name__)


class OpenedCheckpoint(msgspec.Struct, frozen=True):
    """Checkpoint whose tensors have been checked. `spec` has the checkpoint's names of weights.
    `embedding` and `head` are modules: the same one where the weights are tied. `expected`: the
    model's tensors by name."""

    spec: ModelSpec
    checkpoint: Checkpoint
    storage: Storage
    embedding: str
    head: str
    expected: Mapping[str, Expected]


QUANTISED_BESIDE = {
    "hf_quant_config.json": "NVIDIA's ModelOpt",
    "quant_config.json": "AutoAWQ",
    "quantize_config.json": "AutoGPTQ",
    "quanto_qmap.json": "Quanto",
}
"""Files that describe quantised weights, and the libraries that write them. Where `config.json`
describes such weights as well, `config.json` counts."""


def open_checkpoint(config: ModelConfig, *, compare_ends: bool = True) -> OpenedCheckpoint:
    """Map the files of a model, and check their tensors against those of its decoder. Raises
    `UnsupportedModel`. `compare_ends` False: believe the configuration about tied weights, rather
    than read and compare embedding and head."""
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    spec = _as_named(config.spec, checkpoint)
    storage = Storage(config.path, checkpoint.types, config.quantisation)
    embedding, head = _ends(spec, checkpoint, storage, compare=compare_ends)
    expected = _expected(spec, storage, embedding, head)
    remark = _quantised_beside(config) if config.quantisation is None else ""
    checkpoint.expect(expected, _ignored(spec, storage), remark)
    return OpenedCheckpoint(spec, checkpoint, storage, embedding, head, expected)


def _quantised_beside(config: ModelConfig) -> str:
    """Name the file of a folder, other than its `config.json`, that describes quantised weights."""
    there = (name for name in QUANTISED_BESIDE if (config.path / name).is_file())
    name = next(there, None)
    if name is None:
        return ""
    return (
        f"; {name} says that {QUANTISED_BESIDE[name]} quantised the weights, "
        "and config.json has no quantization_config, which is what is read"
    )


def checkpoint_dtype(config: ModelConfig) -> np.dtype[Any]:
    """Return the dtype of the stored embedding; of any stored tensor where transformers runs the
    model."""
    if config.checkpoint_dtype:  # may be a name that only torch knows
        with suppress(TypeError):
            return np.dtype(config.checkpoint_dtype.removeprefix("torch."))
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    if config.spec.transformers is not None:
        return checkpoint.array(next(iter(checkpoint.types))).dtype
    spec = _as_named(config.spec, checkpoint)
    storage = Storage(config.path, checkpoint.types, config.quantisation)
    embedding, _ = _ends(spec, checkpoint, storage, compare=False)
    return checkpoint.array(f"{embedding}.weight").dtype


def is_kv_scale(name: str) -> bool:
    """Tell whether a checkpoint's tensor is a scale of the KV cache."""
    return name.endswith((*KV_SCALES["k"], *KV_SCALES["v"], KV_SCALE))


def _as_named(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Return the spec with the best fitting of its sets of weight names."""

    def found(names: WeightNames) -> int:
        ends = (names.embedding, names.final_norm, names.head)
        return sum(f"{module}.weight" in checkpoint.types for module in ends)

    others = spec.names.others
    best = max(others, key=found, default=spec.names)
    return spec if found(best) <= found(spec.names) else replace(spec, names=best)


def _ends(
    spec: ModelSpec, checkpoint: Checkpoint, storage: Storage, *, compare: bool
) -> tuple[str, str]:
    """Return the modules of the embedding and of the head: the same one if tied or without a head.

    Tied weights may be stored under either name. If both are stored and differ, the weights are not
    tied, whatever the configuration says: so do transformers' readers. With `compare` False nothing
    is read, and the configuration is believed.
    """
    embedding, head = spec.names.embedding, spec.names.head
    if spec.labels == 0:
        return embedding, embedding
    if not spec.tied_embeddings or storage.layout(head) is not None:
        return embedding, head
    if f"{head}.weight" not in checkpoint.types:
        return embedding, embedding
    if f"{embedding}.weight" not in checkpoint.types:
        return head, head
    if not compare:
        return embedding, embedding
    one, other = (checkpoint.array(f"{module}.weight") for module in (embedding, head))
    if (one.dtype, one.shape) == (other.dtype, other.shape) and all(
        np.array_equal(one[at : at + AT_ONCE], other[at : at + AT_ONCE])
        for at in range(0, len(one), AT_ONCE)
    ):
        return embedding, embedding
    log.warning(
        "%s.weight and %s.weight differ: they are not tied, though config.json says so",
        embedding,
        head,
    )
    return embedding, head


def _expected(spec: ModelSpec, storage: Storage, embedding: str, head: str) -> dict[str, Expected]:
    """List every tensor of the architecture, by its name in the checkpoint."""
    ends = (spec.vocab_size, spec.hidden_size)
    found = {f"{spec.names.final_norm}.weight": Expected(((spec.hidden_size,),))}
    if spec.norm.bias:
        found[f"{spec.names.final_norm}.bias"] = Expected(((spec.hidden_size,),))
    positions, table = spec.learned_positions + spec.skipped_positions, spec.names.positions
    if positions:
        found[f"{table}.weight"] = Expected(((positions, spec.hidden_size),))
    rows = spec.vocab_size if head == embedding else spec.head_rows
    found |= storage.possible(head, rows, spec.hidden_size)
    found |= storage.needed(head, rows, spec.hidden_size)
    found |= storage.needed(embedding, *ends)
    for index in range(spec.num_layers):
        for part in layer_parts(spec, index).values():
            found |= _expected_of(part, storage)
            found |= {name: Expected((shape,)) for name, shape in part.biases().items()}
    return found


def _expected_of(part: Part, storage: Storage) -> dict[str, Expected]:
    """List the tensors of a part's weight."""
    quantised = any(storage.layout(module) is not None for module in part.modules)
    if part.columns is None or (part.transposed and not quantised):
        return {name: Expected((shape,)) for name, shape in part.weights().items()}
    if part.transposed and part.count is None:
        raise storage.refusal(f"{part.modules[0]} is quantised and has a row for each input")
    found: dict[str, Expected] = {}
    for module, rows in zip(part.modules, part.rows, strict=True):
        needed = storage.needed(module, rows, part.columns)
        if part.count is None:
            needed |= storage.possible(module, rows, part.columns)
        for name, what in needed.items():
            shapes = tuple(map(part.shape_in_stack, what.shapes))
            found[name] = Expected(shapes, what.types)
    return found


def _ignored(spec: ModelSpec, storage: Storage) -> Callable[[str], bool]:
    """Return a test for names that may be left unread: buffers of old checkpoints, a tied head,
    other models' weights, and scales of a cache or of activations."""
    buffers = (".rotary_emb.inv_freq", *spec.names.buffers)
    count = spec.num_layers
    further = tuple(
        spec.names.layer.format(count + index) for index in range(spec.names.further_layers)
    )

    apart = (*further, *spec.names.apart)

    def ignored(name: str) -> bool:
        if name == f"{spec.names.head}.weight":
            return spec.tied_embeddings or spec.labels == 0
        if name.endswith(buffers) or is_kv_scale(name) or name.startswith(apart):
            return True
        return storage.passed_over(name)

    return ignored
