"""Load the matrices of adapters, joined as the decoder's weights are."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from rootlace.kernels.arrays import torch_dtype
from rootlace.runtime.model.checkpoint.weights import Part, layer_parts, row_order
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames
from rootlace.runtime.model.options import ALL_LINEAR, WEIGHTS, AdapterConfig
from rootlace.runtime.model.parallel.shard import Shard

log = logging.getLogger(__name__)

# Weights ------------------------------------------------------------------------------------------


FIXED = ("kv_up", "k_up", "v_up")
"""Products of a layer that adapters may not change: no token is multiplied by them."""
ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
"""Pattern of a module of one expert; stacked experts are no modules."""
STACKS = {"gate_up": "gate_up_proj", "down": "down_proj"}
"""Names of stacked experts' parameters in transformers from version 5 on, where every family calls
a layer's mixture `MIXTURE`."""
MIXTURE = "mlp"
STACKED_SINCE = (0, 19, 1)
"""First version of PEFT whose A has the inputs of stacked experts in every family."""
PREFIX = "base_model.model."
"""Prefix of module names in PEFT's files."""
A, B = ".lora_A.weight", ".lora_B.weight"


Pair = tuple[torch.Tensor, torch.Tensor]
"""A and B, float32."""


class LowRank(msgspec.Struct, frozen=True):
    """Low-rank addition to a product of x: (x a^T) b^T, with the adapter's scale in `b`. A part of
    several modules has all their ranks side by side."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]


class Adapter(msgspec.Struct, frozen=True):
    """Adapter: additions to products, by layer and name of `layer_parts`, experts included."""

    name: str
    layers: Sequence[Mapping[str, LowRank]]


def load_adapters(
    configs: Sequence[AdapterConfig], spec: ModelSpec, dtype: np.dtype[Any], device: str
) -> list[Adapter]:
    """Load each adapter; see `load_adapter`."""
    there = torch_dtype(dtype), torch.device(device)
    return [load_adapter(one, spec, *there) for one in configs]


def load_adapter(
    config: AdapterConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Load an adapter. Raises `UnsupportedModel` if tensors are not those of the modules that the
    configuration names, or have other shapes."""
    stored = _tensors(config)
    names = _as_named(spec, stored)
    read = _Read(config, spec, names, stored)
    for end in (names.embedding, names.head):
        if config.targets(end, linear_layer=False):
            raise config.refuse(f"it changes {end}, which is not supported")
    apart = any(map(ONE_EXPERT.search, stored))
    expected: set[str] = set()
    layers: list[dict[str, LowRank]] = []
    for index in range(spec.num_layers):
        found = {}
        for name, part in layer_parts(spec, index).items():
            if part.columns is None or part.count is not None or name in FIXED:
                continue
            modules = read.targeted(part)
            if name.startswith("experts.") and not apart:
                modules = {}
            if config.chosen == ALL_LINEAR and name in ("router", "shared_gate"):
                modules = {at: one for at, one in modules.items() if one + A in stored}
            if not modules:
                continue
            expected |= {module + end for module in modules.values() for end in (A, B)}
            pairs = read.pairs(part, modules)
            found[name] = _joined(part, pairs, row_order(spec, name), dtype, device)
        for name, module, low_rank in read.of_parameters(index):
            expected |= {module + A, module + B}
            found[name] = LowRank(*(one.to(device, dtype).contiguous() for one in low_rank))
        layers.append(found)
    extra = sorted(stored.keys() - expected)
    if extra:
        module = extra[0].removesuffix(A).removesuffix(B)
        if config.targets(module):
            raise config.refuse(f"it changes {module}, which is not supported")
        raise config.refuse(
            f"{WEIGHTS} has {extra[0]}, of no product of a layer that target_modules names"
        )
    if not expected:
        raise config.refuse(f"target_modules {config.chosen!r} names no product of a layer")
    for module in sorted(name.removesuffix(A) for name in expected if name.endswith(A)):
        if len({*config.alphas_of(module)}) > 1:
            # PEFT sorts patterns when it saves them; training may have used another order.
            log.warning(
                "adapter %r: several of alpha_pattern match %s; the first counts, alpha %g, as "
                "where PEFT loads the adapter, and may not be the one it was trained with",
                config.name,
                module,
                config.alphas_of(module)[0],
            )
            break
    return Adapter(config.name, layers)


def share_of(adapter: Adapter, shard: Shard) -> Adapter:
    """Cut an adapter to one rank's part of the products."""

    def part(name: str, whole: LowRank) -> LowRank:
        columns, rows = shard.columns(name, whole.a.shape[1]), shard.rows(name, len(whole.b))
        a = whole.a if columns is None else whole.a[:, columns.start : columns.stop].contiguous()
        return LowRank(a, whole.b if rows is None else whole.b[torch.tensor(rows)])

    layers = [{name: part(name, one) for name, one in layer.items()} for layer in adapter.layers]
    return Adapter(adapter.name, layers)


def _tensors(config: AdapterConfig) -> dict[str, torch.Tensor]:
    """Read the adapter's tensors by the names that modules have in the model."""
    file = config.folder / WEIGHTS
    if not file.is_file():
        raise config.refuse(f"{WEIGHTS} is missing (older formats have to be converted to it)")
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            return {name.removeprefix(PREFIX): opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise config.refuse(f"{WEIGHTS}: {error}") from error


def _as_named(spec: ModelSpec, stored: Mapping[str, torch.Tensor]) -> WeightNames:
    """Return the spec's set of names that fits the adapter's modules best: the adapter may have
    been made for the model without its head."""

    def found(names: WeightNames) -> int:
        start = names.layer.partition("{}")[0]
        return sum(name.startswith(start) for name in stored)

    return max((spec.names, *spec.names.others), key=found)


class _Read(msgspec.Struct, frozen=True):
    """Reader of an adapter: its tensors, and the names of its modules."""

    config: AdapterConfig
    spec: ModelSpec
    names: WeightNames
    stored: Mapping[str, torch.Tensor]

    def targeted(self, part: Part) -> dict[int, str]:
        """Return the modules of a part that the adapter changes, named as in the adapter's model,
        by their places in the part."""
        ours, other = (one.layer.partition("{}")[0] for one in (self.spec.names, self.names))
        modules = [other + module.removeprefix(ours) for module in part.modules]
        return {at: module for at, module in enumerate(modules) if self.config.targets(module)}

    def pairs(self, part: Part, modules: Mapping[int, str]) -> dict[int, Pair]:
        """Return A and the scaled B of each module, float32."""
        pairs = {}
        for at, module in modules.items():
            rank = self.config.rank_of(module)
            a, b = self.pair(module, (rank, part.columns or 0), (part.rows[at], rank))
            pairs[at] = (a, b * self.config.scale_of(module))
        return pairs

    def pair(self, module: str, of_a: tuple[int, int], of_b: tuple[int, int]) -> Pair:
        """Return A and B of a module, of these shapes, float32."""
        config = self.config
        for end, shape in ((A, of_a), (B, of_b)):
            tensor = self.stored.get(module + end)
            if tensor is None:
                raise config.refuse(f"{WEIGHTS} does not have {module}{end}")
            if tuple(tensor.shape) != shape or not tensor.is_floating_point():
                found = f"{list(tensor.shape)} of {tensor.dtype}"
                raise config.refuse(f"{WEIGHTS}: {module}{end} is {found}, expected {list(shape)}")
            if not tensor.float().isfinite().all():
                raise config.refuse(f"{WEIGHTS}: {module}{end} has numbers that are not finite")
        return self.stored[module + A].float(), self.stored[module + B].float()

    def of_parameters(self, index: int) -> Iterator[tuple[str, str, Pair]]:
        """Yield additions to a layer's parameters that are no modules' weights (PEFT's
        `target_parameters`): a name of `layer_parts`, the adapter's module, and a and b.

        PEFT wraps the module once for each such parameter; the first parameter's wrapper is inside
        the second's ("base_layer"). For E stacked experts A has E times `rank` rows, expert by
        expert, and B as many columns, rank by rank (peft's `ParamWrapper`).
        """
        config, spec = self.config, self.spec
        experts = spec.experts
        if experts is None or index not in experts.layers or not config.parameters:
            return
        mixture = self.names.layer.format(index) + MIXTURE
        router = f"{mixture}.{spec.names.parts['router'][0].rpartition('.')[2]}"
        if config.targets_parameter(f"{router}.weight"):
            rank = config.rank_of(f"{router}.weight")
            of_a, of_b = (rank, spec.hidden_size), (experts.count, rank)
            a, b = self.pair(router, of_a, of_b)
            yield "router", router, (a, b * config.scale_of(f"{router}.weight"))
        holder = f"{mixture}.experts"
        wanted = [one for one in STACKS if config.targets_parameter(f"{holder}.{STACKS[one]}")]
        if wanted and config.version < STACKED_SINCE:
            raise config.refuse(
                f"target_parameters: {holder} was adapted otherwise before PEFT "
                f"{'.'.join(map(str, STACKED_SINCE))}, and peft_version is "
                f"{'.'.join(map(str, config.version)) or 'missing'}"
            )
        sizes = {"gate_up": (spec.hidden_size, 2 * experts.inner_size)}
        sizes["down"] = (experts.inner_size, spec.hidden_size)
        for one in wanted:
            parameter, module = f"{holder}.{STACKS[one]}", holder
            if one != wanted[-1]:
                module += ".base_layer"
            rank, (inputs, outputs) = config.rank_of(parameter), sizes[one]
            ranks = rank * experts.count
            a, b = self.pair(module, (ranks, inputs), (outputs, ranks))
            b = b.view(outputs, rank, experts.count) * config.scale_of(parameter)
            order = row_order(spec, f"experts.{one}")
            b = b if order is None else b[torch.tensor(order)]
            for expert, rows in enumerate(a.split(rank)):
                yield f"experts.{expert}.{one}", module, (rows, b[:, :, expert])


def _joined(
    part: Part,
    pairs: Mapping[int, Pair],
    order: list[int] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> LowRank:
    starts = [sum(part.rows[:at]) for at in range(len(part.rows))]
    b = torch.zeros(sum(part.rows), sum(len(a) for a, _ in pairs.values()))
    rank = 0
    for at, (a, columns) in pairs.items():
        b[starts[at] : starts[at] + part.rows[at], rank : rank + len(a)] = columns
        rank += len(a)
    if order is not None:
        b = b[torch.tensor(order)]
    a = torch.cat([a for a, _ in pairs.values()])
    return LowRank(*(one.to(device, dtype).contiguous() for one in (a, b)))
