"""compressed-tensors: what llm-compressor writes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rootlace.runtime.model.checkpoint.quantised.layouts import (
    ALL,
    Block,
    Floats4,
    Layout,
    Numbers,
    PackedInts,
    Quantisation,
    Rule,
)
from rootlace.runtime.model.checkpoint.quantised.settings import (
    GROUP,
    PAIR,
    activations_remark,
    read_pattern,
)
from rootlace.runtime.model.families.config_reader import (
    NUMBER,
    TABLE,
    TEXT,
    TEXTS,
    ConfigReader,
    Kind,
)

NUMBERS = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
"""Formats of a matrix of numbers and its scales."""
FLOATS4 = (Floats4("mxfp4"), Floats4("nvfp4"))

ORDER = Kind("a text or false", lambda value: TEXT.fits(value) or value is False)
SIZES = re.compile(r"[1-9]\d{0,8}x[1-9]\d{0,8}")
STRUCTURE = Kind(
    "two sizes", lambda found: PAIR.fits(found) or bool(TEXT.fits(found) and SIZES.fullmatch(found))
)
CLASSES = ("Linear", "LinearBase")
"""What targets call the classes of all modules that are multiplied by."""


def read(config: ConfigReader) -> Quantisation | None:
    """None where the KV cache alone is to be quantised: its scales are found by their names."""
    _read_remarks(config)
    _read_sparsity(config)
    cache = config.get("kv_cache_scheme", TABLE.or_none(), None)
    form = config.get("format", TEXT.or_none(), None)
    if not config.get("config_groups", TABLE.or_none(), None):
        if not cache:
            config.refuse("config_groups", "it says nothing of weights")
        config.get("ignore", TEXTS.or_none(), None)
        return None
    groups = config.table("config_groups")
    rules: dict[str, Layout] = {}
    remarks: dict[str, None] = {}
    for name in groups:
        group = groups.table(name)
        targets = group.get("targets", TEXTS)
        layout = _layout(group, form)
        if layout is not None and "Embedding" in targets:
            group.refuse("targets", "a quantised embedding is not supported")
        remarks |= dict.fromkeys(_activations(group))
        group.finish(frozenset())
        if layout is not None:
            rules |= dict.fromkeys(targets, layout)
    ignored = config.get("ignore", TEXTS.or_none(), None) or []
    return Quantisation(
        "compressed-tensors",
        (*_ignored(config, ignored), *_rules(config, rules)),
        tuple(remarks),
    )


def _ignored(config: ConfigReader, names: list[str]) -> Iterator[Rule]:
    for name in names:
        yield Rule(_pattern(config, "ignore", name))


def _rules(config: ConfigReader, targets: dict[str, Layout]) -> Iterator[Rule]:
    """A name goes before patterns, and these before classes."""
    for name in sorted(
        targets.keys() - {*CLASSES}, key=lambda name: (name.startswith("re:"), name)
    ):
        yield Rule(_pattern(config, "config_groups", name), (targets[name],))
    for name in CLASSES:
        if name in targets:
            yield Rule(ALL, (targets[name],))


def _pattern(config: ConfigReader, key: str, name: str) -> re.Pattern[str]:
    if name in CLASSES:
        return ALL
    if name.startswith("re:"):
        return read_pattern(config, key, name.removeprefix("re:"))
    return re.compile(re.escape(name) + r"\Z")


def _read_remarks(config: ConfigReader) -> None:
    """What says nothing about how weights are stored."""
    config.pass_over("version", "quantization_status", "global_compression_ratio", "run_compressed")


def _read_sparsity(config: ConfigReader) -> None:
    """Refuse weights of which some are left out, and such as are rotated where they are used."""
    if config.get("sparsity_config", TABLE.or_none(), None):
        sparsity = config.table("sparsity_config")
        if sparsity.get("format", TEXT, "dense") != "dense":
            sparsity.refuse("format", "sparse weights cannot be read")
    if config.get("transform_config", TABLE.or_none(), None):
        transforms = config.table("transform_config")
        if transforms.get("config_groups", TABLE.or_none(), None):
            transforms.refuse("config_groups", "rotated weights are not supported")
    if config.get("moe_sparsity_config", TABLE.or_none(), None):
        config.refuse("moe_sparsity_config", "it is not supported")


def _layout(group: ConfigReader, form: str | None) -> Layout | None:
    """How the weights of a group are stored; None: as they are."""
    form = group.get("format", TEXT.or_none(), None) or form
    if not group.get("weights", TABLE.or_none(), None):
        return None
    weights = group.table("weights")
    bits, kind = weights.size("num_bits"), weights.get("type", TEXT, "int")
    symmetric = weights.flag("symmetric", True)
    weights.get("actorder", ORDER.or_none(), None)  # the file says it itself
    weights.only("dynamic", False)
    weights.pass_over("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    block = _block(weights)
    weights.finish(frozenset())
    found = _layout_of(form, bits, kind, symmetric, block)
    if found is None:
        group.refuse(
            "weights",
            f"weights of {bits} bits and type {kind} in the format {form} cannot be read",
        )
    return found


def _layout_of(
    form: str | None, bits: int, kind: str, symmetric: bool, block: Block
) -> Layout | None:
    """What a format makes of such weights; None: it is not read."""
    if form == "pack-quantized" and kind == "int" and bits in (4, 8):
        return PackedInts(4 if bits == 4 else 8, block, symmetric)
    if form in NUMBERS and bits == 8 and kind == "int":
        return Numbers("int8", block, symmetric=symmetric)
    if form in NUMBERS and bits == 8 and kind == "float" and symmetric:
        return Numbers("fp8_e4m3", block)
    for floats in FLOATS4:
        stated = (floats.form + "-pack-quantized", 4, "float", True, Block(1, floats.group))
        if (form, bits, kind, symmetric, block) == stated:
            return floats
    return None


def _block(weights: ConfigReader) -> Block:
    """The weights that share a scale."""
    size = weights.get("group_size", GROUP.or_none(), None)
    inferred = {None: "tensor", -1: "channel"}.get(size, "group")
    strategy = weights.get("strategy", TEXT.or_none(), None) or inferred
    structure = weights.get("block_structure", STRUCTURE.or_none(), None)
    if isinstance(structure, str):
        structure = [int(size) for size in structure.split("x")]
    known = {"tensor": Block(), "channel": Block(rows=1)}
    if inferred == "group":
        known |= dict.fromkeys(("group", "tensor_group"), Block(1, size))
    if structure is not None:
        known["block"] = Block(*structure)
    if strategy not in known:
        weights.refuse("strategy", f"it is not supported with group_size {size}")
    return known[strategy]


def _activations(group: ConfigReader) -> Iterator[str]:
    """Remarks about activations, which are not quantised whatever the group says."""
    for key in ("input_activations", "output_activations"):
        if not group.get(key, TABLE.or_none(), None):
            continue
        found = group.table(key)
        bits, kind = found.get("num_bits", NUMBER, 8), found.get("type", TEXT, "int")
        yield activations_remark(f"{kind}{bits}")
