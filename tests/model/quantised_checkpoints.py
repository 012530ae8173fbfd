"""Small quantised checkpoints, and what each of their weights stands for by an oracle of its own.

compressed-tensors' are written by that package. Those of other methods are packed here, integer by
integer, as their formats are described.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.model.checkpoints import save

Tensors = dict[str, torch.Tensor]
Write = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A module's name and weight -> its tensors, by what follows the name, and the weight that they
stand for in float32."""


def quantised(
    source: PreTrainedConfig | Path,
    folder: Path,
    settings: Mapping[str, Any],
    write: Write,
    dtype: torch.dtype = torch.float32,
    modules: tuple[str, ...] = ("_proj",),
) -> Path:
    """Write `folder / "quantised"`, whose modules with such names are stored as `write` says, and
    return `folder / "dense"`, with what they stand for. `source`: a random model's configuration,
    or the folder of a model."""
    dense, packed = folder / "dense", folder / "quantised"
    for target in (dense, packed):
        if isinstance(source, Path):
            target.mkdir()
            for file in source.glob("*.json"):
                shutil.copyfile(file, target / file.name)
            shutil.copyfile(source / WEIGHTS, target / WEIGHTS)
        else:
            save(source, target, dtype=dtype)
    weights = {name: tensor.clone() for name, tensor in load_file(dense / WEIGHTS).items()}
    stored: Tensors = {}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if module == name or not module.endswith(modules):
            stored[name] = tensor
            weights[name] = tensor.float()
            continue
        found, weights[name] = write(module, tensor)
        stored |= {module + suffix: value.contiguous() for suffix, value in found.items()}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, dense / WEIGHTS)
    save_file(stored, packed / WEIGHTS)
    edit(packed, quantization_config=dict(settings))
    return dense


WEIGHTS = "model.safetensors"


def edit(folder: Path, **keys: Any) -> None:
    """Change keys of a folder's configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


# ------------------------------------------------------------ compressed-tensors


def compressed(
    form: str, weights: Mapping[str, Any], **settings: Any
) -> tuple[dict[str, Any], Write]:
    """Return the package's tensors for linear modules, and a function that reads them."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, **settings)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale, zero_point = parameters(weight, args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = torch.tensor([37.0])
            state["weight_scale"] = (scale * 37.0).to(torch.float8_e4m3fn).to(scale.dtype)
        packed = compressor.compress(state, scheme)
        return {f".{name}": value for name, value in packed.items()}, read(packed)

    def read(packed: Tensors) -> torch.Tensor:
        """Read in float32: the package rounds to the dtype of the scales, or to bfloat16."""
        scale = packed["weight_scale"]
        if args.strategy == "tensor_group":
            values = unpack_fp4_from_uint8(
                packed["weight_packed"], len(scale), scale.shape[1] * 16, torch.float32
            )
            wide, all_of_them = scale.float(), packed["weight_global_scale"]
            return dequantize(values, wide, args=args, global_scale=all_of_them)
        if scale.dtype != torch.uint8:
            packed = packed | {"weight_scale": scale.float()}
        return compressor.decompress(packed, scheme)["weight"].float()

    return json.loads(config.model_dump_json()), write


def parameters(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales by largest magnitudes, or ranges with zero points, of the weights that share
    them."""
    rows, columns = weight.shape
    high, wide = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": tuple(args.block_structure or ()),
    }.get(str(args.strategy), (1, args.group_size))
    tiles = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    tiles = tiles.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2).flatten(2)
    low, top = tiles.amin(2), tiles.amax(2)
    if args.strategy == "tensor":
        low, top = low.view(1), top.view(1)
    if args.symmetric:
        largest = {("float", 8): 448.0, ("float", 4): 6.0}.get((str(args.type), args.num_bits))
        scale = torch.maximum(top, -low) / (largest or 2 ** (args.num_bits - 1) - 1)
        if args.type == "float" and args.scale_dtype == torch.uint8:
            scale = scale.log2().ceil().exp2()
        return scale, torch.zeros_like(scale, dtype=torch.int8)
    scale = ((top - low) / (2**args.num_bits - 1)).to(weight.dtype)
    zeros = (-(2 ** (args.num_bits - 1)) - low / scale).round()
    bound = 2 ** (args.num_bits - 1)
    return scale, zeros.clamp(-bound, bound - 1).to(torch.int8)


# ------------------------------------------------------------ integers packed by hand


def rounded(
    weight: torch.Tensor, group: int, bits: int, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned integers [rows, columns], scales (float16) and zero points [rows, groups] where
    column i is of group groups[i]."""
    count = int(groups.max()) + 1
    scales, zeros = [], []
    for index in range(count):
        own = weight[:, groups == index].float()
        low, top = own.amin(1).clamp(max=0.0), own.amax(1).clamp(min=0.0)
        scale = ((top - low) / (2**bits - 1)).half()
        scales.append(scale)
        zeros.append((-low / scale.float()).round().clamp(0, 2**bits - 1).int())
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    values = weight.float() / scale.float()[:, groups] + zero[:, groups]
    return values.round().clamp(0, 2**bits - 1).int(), scale, zero


def words(values: list[int], bits: int) -> int:
    """Integers in one of 32 bits, the first one in the lowest, as a signed number."""
    word = 0
    for place, value in enumerate(values):
        word |= value << (bits * place)
    return word - (1 << 32) if word >> 31 else word


def packed_down(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] -> int32 [n * bits / 32, m]: neighbours of a column in a word."""
    count = 32 // bits
    return torch.tensor(
        [
            [words(values[i : i + count, j].tolist(), bits) for j in range(values.shape[1])]
            for i in range(0, len(values), count)
        ],
        dtype=torch.int32,
    )


def gptq(
    bits: int, group: int, version: str = "gptq", *, order: bool = False, symmetric: bool = False
) -> tuple[dict[str, Any], Write]:
    """GPTQ's format. `order`: which group a column is of is drawn, the same for modules of the same
    inputs."""

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        groups = torch.arange(columns) // size
        if order:
            # Modules of the same inputs have one order.
            alone = module.endswith(("o_proj", "down_proj"))
            inputs = module if alone else module.rpartition(".")[0]
            seed = sum(map(ord, inputs))
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
        values, scales, zeros = rounded(weight, size, bits, groups)
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        stored = zeros if version == "gptq_v2" else (zeros - 1) % 2**bits
        read = (values - zeros[:, groups]).float() * scales.float()[:, groups]
        tensors = {
            ".qweight": packed_down(values.t(), bits),
            ".qzeros": packed_down(stored, bits).t(),
            ".scales": scales.t(),
            ".g_idx": groups.int(),
        }
        return tensors, read

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": order,
        "sym": symmetric,
        "checkpoint_format": version,
        "damp_percent": 0.01,
        "true_sequential": True,
        "model_name_or_path": None,
        "meta": {"quantizer": ["gptqmodel:5.0.0"]},
    }
    return settings, write


def awq(group: int, *, symmetric: bool = False) -> tuple[dict[str, Any], Write]:
    """AWQ's format, version gemm."""

    def packed(values: torch.Tensor) -> torch.Tensor:
        """[n, m] -> int32 [n, m / 8]."""
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return torch.tensor(
            [
                [words([row[j + k] for k in order], 4) for j in range(0, len(row), 8)]
                for row in values.tolist()
            ],
            dtype=torch.int32,
        )

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = torch.arange(weight.shape[1]) // group
        values, scales, zeros = rounded(weight, group, 4, groups)
        if symmetric:
            zeros = torch.full_like(zeros, 8)
        read = (values - zeros[:, groups]).float() * scales.float()[:, groups]
        tensors = {
            ".qweight": packed(values.t()),
            ".qzeros": packed(zeros.t()),
            ".scales": scales.t(),
        }
        return tensors, read

    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": not symmetric,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return settings, write


# ------------------------------------------------------------ AutoRound


AUTO_ROUND = {
    "amp": False,
    "autoround_version": "0.16.1",
    "block_name_to_quantize": "model.layers",
    "enable_quanted_input": False,
    "iters": 0,
}
"""Entries of AutoRound 0.16.1 about its search for the weights."""


def auto_round(
    form: str, like: tuple[dict[str, Any], Write], **settings: Any
) -> tuple[dict[str, Any], Write]:
    """AutoRound's own configuration, of weights that are packed as another method's are."""
    own = {"quant_method": "auto-round", "packing_format": f"auto_round:{form}", "sym": True}
    return AUTO_ROUND | own | {"data_type": "int"} | settings, like[1]


# ------------------------------------------------------------ floats of eight and four bits


def fp8(
    block: tuple[int, int] | None, name: str = ".weight_scale_inv", *, exponents: bool = False
) -> tuple[dict[str, Any], Write]:
    """Store as DeepSeek and Qwen do; `block` None: one scale for a module, as AutoFP8."""

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        high, wide = block or (rows, columns)
        scales = torch.empty(-(-rows // high), -(-columns // wide))
        values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        read = torch.empty(rows, columns)
        for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[place].float().abs().max() / 448.0
            if exponents:
                scales[i, j] = scales[i, j].log2().ceil().exp2()
            values[place] = (weight[place].float() / scales[i, j]).to(torch.float8_e4m3fn)
            read[place] = values[place].float() * scales[i, j]
        stored = scales if block else scales.view(())
        if exponents:
            stored = (stored.log2() + 127).to(torch.uint8)
        tensors = {".weight": values, name: stored}
        if not block:
            tensors[".input_scale"] = torch.tensor(0.5)
        return tensors, read

    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if block:
        settings |= {"fmt": "e4m3", "weight_block_size": list(block)}
    else:
        settings |= {"activation_scheme": "static", "ignored_layers": ["lm_head"]}
    return settings, write


def mxfp4() -> tuple[dict[str, Any], Write]:
    """Store random codes as gpt-oss does; transformers gives their values."""

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        drawn = torch.Generator().manual_seed(rows + columns)
        codes = torch.randint(0, 256, (rows, columns // 32, 16), generator=drawn).byte()
        scales = torch.randint(121, 126, (rows, columns // 32), generator=drawn).byte()
        read = convert_moe_packed_tensors(codes[None], scales[None], dtype=torch.float32)
        return {"_blocks": codes, "_scales": scales}, read[0].t().contiguous()

    return {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, write
