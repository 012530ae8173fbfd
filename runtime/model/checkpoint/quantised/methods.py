"""Read a `quantization_config`: the method that wrote the checkpoint, and the modules' storage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from rootlace.runtime.model.checkpoint.quantised.layouts import (
    ALL,
    Awq,
    Block,
    Blocks,
    Floats4,
    Gptq,
    Layout,
    Numbers,
    PackedInts,
    Quantisation,
    Rule,
)
from rootlace.runtime.model.checkpoint.quantised.patterns import TooManyWays, compiled, shown
from rootlace.runtime.model.families.config_reader import (
    FLAG,
    NUMBER,
    SIZE,
    TABLE,
    TEXT,
    TEXTS,
    ConfigReader,
    Kind,
    names,
)

# Settings -----------------------------------------------------------------------------------------


GROUP = Kind("a positive integer or -1", lambda value: value == -1 or SIZE.fits(value))
PAIR = Kind(
    "two positive integers",
    lambda value: type(value) is list and len(value) == 2 and all(map(SIZE.fits, value)),
)
MODULES = Kind(
    "a list of modules",
    lambda value: TEXTS.fits(value) or (type(value) is list and all(map(TEXTS.fits, value))),
)

GPTQ_REMARKS = names(
    # Settings of the search for the weights.
    "damp_percent damp_auto_increment mse dataset tokenizer batch_size model_seqlen "
    "block_name_to_quantize module_name_preceding_first_block cache_block_outputs true_sequential "
    "act_group_aware meta model_name_or_path model_file_base_name pad_token_id hyb_act "
    "offload_to_disk offload_to_disk_path "
    # Settings for other programs that run the model.
    "backend use_exllama disable_exllama exllama_config use_cuda_fp16 max_input_length"
)


def read_group(config: ConfigReader, key: str, default: int) -> int | None:
    """Read the number of inputs that share a scale; None: all inputs, -1 in files."""
    group: int = config.get(key, GROUP, default)
    return None if group == -1 else group


def read_modules(config: ConfigReader, key: str) -> bool:
    """Tell whether modules are listed. The stored tensors decide which modules are quantised."""
    return bool(config.get(key, MODULES.or_none(), None))


def read_pair(config: ConfigReader, key: str) -> tuple[int, int] | None:
    """Read the sizes of a block."""
    found = config.get(key, PAIR.or_none(), None)
    return None if found is None else (found[0], found[1])


def read_pattern(config: ConfigReader, key: str, pattern: str) -> re.Pattern[str]:
    """Compile the pattern of module names at `key`."""
    try:
        return compiled(pattern)
    except TooManyWays as error:
        config.refuse(key, f"{shown(pattern)} might take too long to match: {error}")
    except (re.error, RecursionError, OverflowError) as error:
        config.refuse(key, f"{shown(pattern)} is not a regular expression: {error}")


AUTO_ROUND_REMARKS = names(
    # Settings of AutoRound's search for the weights, in any format.
    "amp autoround_version provider batch_size enable_minmax_tuning enable_norm_bias_tuning "
    "enable_quanted_input gradient_accumulate_steps iters lr low_gpu_mem_usage minmax_lr nsamples "
    "seqlen dataset scale_dtype supported_types "
    # The stored tensors decide which modules are quantised.
    "block_name_to_quantize to_quant_block_names quant_block_list"
)
AUTO_ROUND_ACTIVATIONS = ("act_bits", "act_sym", "act_data_type", "act_dynamic", "act_group_size")


def read_quark(config: ConfigReader, *, packed: bool) -> None:
    """Check the settings that AMD's Quark adds to another method's. `packed`: several codes share a
    larger number."""
    tables = [config]
    if config.get("export", TABLE.or_none(), None):
        tables.append(config.table("export"))
        tables[1].only("weight_format", "real_quantized")
        tables[1].pass_over("kv_cache_group", "min_kv_scale", "weight_merge_groups")
    for table in tables:
        if packed:
            # "order" means neighbours in the order 0 1 2 ..., which no reader of AWQ expects.
            table.only("pack_method", "reorder")
        table.pass_over("pack_method")
    for table in tables[1:]:
        table.finish(frozenset())


def activations_remark(kind: str) -> str:
    """Return the remark on checkpoints whose activations were meant to be quantised too."""
    return (
        f"activations are not rounded to {kind}, for which the weights were made: they keep the "
        "precision that they are computed in"
    )


# Gptq ---------------------------------------------------------------------------------------------
#
# GPTQ, as AutoGPTQ and GPTQModel write it.


BITS = Kind("4 or 8", lambda bits: type(bits) is int and bits in (4, 8))


def read_gptq(config: ConfigReader) -> Quantisation:
    """Read GPTQ's settings. The tensors say which modules are quantised, and the column order."""
    minus_one = _stored_minus_one(config)
    bits = config.get("bits", BITS)
    group = read_group(config, "group_size", 128)

    def stored(part: ConfigReader) -> Layout:
        return Gptq(
            part.get("bits", BITS, bits), read_group(part, "group_size", group or -1), minus_one
        )

    rules = _dynamic(config, stored)
    config.only("method", "gptq")
    config.only("pack_dtype", "int32")
    config.only("is_marlin_format", False)
    config.only("use_marlin", False)
    config.flag("sym", True)
    for key in ("desc_act", "static_groups", "true_sequential", "lm_head", "act_group_aware"):
        config.get(key, FLAG.or_none(), None)
    for key in ("modules_to_not_convert", "modules_in_block_to_quantize"):
        read_modules(config, key)
    config.only("data_type", "int")
    config.pass_over(*GPTQ_REMARKS, *AUTO_ROUND_REMARKS)
    return Quantisation("GPTQ", (*rules, Rule(ALL, (Gptq(bits, group, minus_one),))))


def _stored_minus_one(config: ConfigReader) -> bool:
    """Tell whether zero points are stored less one, as in the first version of the format."""
    found = "gptq"
    for key in ("format", "checkpoint_format"):
        found = config.get(key, TEXT.or_none(), None) or found
        if found.lower() not in ("gptq", "gptq_v2"):
            config.refuse(key, "only gptq and gptq_v2 are read")
    return found.lower() == "gptq"


def _dynamic(config: ConfigReader, stored: Callable[[ConfigReader], Layout]) -> list[Rule]:
    """Read the rules of single modules, by a pattern of names; "-:" before a pattern: not
    quantised. `stored` reads a module's layout."""
    found: list[Rule] = []
    if not config.get("dynamic", TABLE.or_none(), None):
        return found
    modules = config.table("dynamic")
    for name in modules:
        pattern = read_pattern(modules, name, re.sub(r"^[+-]:", "", name))
        part = modules.table(name)
        if name.startswith("-:"):
            found.append(Rule(pattern))
            continue
        layout = stored(part)
        for key in ("sym", "desc_act"):
            part.get(key, FLAG.or_none(), None)
        part.pass_over(*GPTQ_REMARKS)
        part.finish(frozenset())
        found.append(Rule(pattern, (layout,)))
    return found


# Awq ----------------------------------------------------------------------------------------------
#
# AWQ, as AutoAWQ and GPTQModel write it.


GEMM = ("gemm", "exllama")
"""Names of the same layout."""


def read_awq(config: ConfigReader) -> Quantisation:
    """Read AWQ's settings. The tensors say which modules are quantised."""
    for key in ("version", "format", "checkpoint_format"):
        if str(config.get(key, TEXT, "gemm")).lower() not in GEMM:
            config.refuse(key, "only the version gemm of AWQ is read")
    config.only("method", "awq")
    config.only("pack_dtype", "int32")
    config.only("bits", 4)
    config.only("w_bit", 4)
    # False means that all zero points are the middle of the range; the file has them anyway.
    symmetric = not config.flag("zero_point", True)
    group = read_group(config, "q_group_size" if "q_group_size" in config else "group_size", 128)

    def stored(part: ConfigReader) -> Layout:
        part.only("bits", 4)
        return Awq(read_group(part, "group_size", group or -1), symmetric)

    rules = _dynamic(config, stored)
    read_modules(config, "modules_to_not_convert")
    # AutoAWQ's settings to run the model, and copies of GPTQ's settings by transformers.
    config.pass_over("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", *GPTQ_REMARKS)
    config.pass_over("desc_act", "sym", "lm_head", *AUTO_ROUND_REMARKS)
    config.only("data_type", "int")
    read_quark(config, packed=True)
    config.get("exllama_config", TABLE.or_none(), None)
    return Quantisation("AWQ", (*rules, Rule(ALL, (Awq(group, symmetric),))))


# Fp8 ----------------------------------------------------------------------------------------------
#
# Weights in floats of eight bits, as transformers, DeepSeek, Qwen and AutoFP8 write them.


CACHE = Kind("a text or an object", lambda value: TEXT.fits(value) or TABLE.fits(value))


def read_fp8(config: ConfigReader) -> Quantisation:
    """Read fp8 settings. The tensors say which modules are quantised."""
    layouts = _fp8_layouts(config)
    if config.get("scale_fmt", TEXT.or_none(), None) not in (None, "float", "ue8m0"):
        config.refuse("scale_fmt", "only float and ue8m0 are known")
    for key in ("modules_to_not_convert", "ignored_layers"):
        read_modules(config, key)
    if read_modules(config, "modules_to_convert"):
        config.refuse("modules_to_convert", "an embedding in eight bits is not supported")
    # The cache's scales are found by their names.
    config.get("kv_cache_scheme", CACHE.or_none(), None)
    read_modules(config, "kv_cache_quant_targets")
    config.get("dequantize", FLAG, False)
    config.only("expert_dtype", "fp8")
    read_quark(config, packed=False)
    # AutoRound's further settings.
    config.only("bits", 8)
    config.only("data_type", "fp")
    config.only("sym", True)
    config.pass_over("group_size", *AUTO_ROUND_REMARKS, *AUTO_ROUND_ACTIVATIONS)
    return Quantisation("fp8", (Rule(ALL, layouts),), (activations_remark("fp8"),))


def _fp8_layouts(config: ConfigReader) -> tuple[Layout, ...]:
    """Return fp8 layouts. `weight_scale_inv` multiplies numbers, as `weight_scale` does."""
    size = read_pair(config, "weight_block_size")
    block = None if size is None else Block(*size)
    config.only("fmt", "e4m3")
    scheme = str(config.get("activation_scheme", TEXT, "dynamic"))
    if scheme not in ("dynamic", "static"):
        config.refuse("activation_scheme", "only dynamic and static are known")
    scales = (".weight_scale_inv", ".weight_scale")
    return tuple(Numbers("fp8_e4m3", block, scale) for scale in scales)


# Mxfp4 --------------------------------------------------------------------------------------------
#
# MXFP4, as gpt-oss writes weights.


def read_mxfp4(config: ConfigReader) -> Quantisation:
    """Read MXFP4 settings. The tensors say which modules are quantised."""
    read_modules(config, "modules_to_not_convert")
    config.get("dequantize", FLAG, False)
    return Quantisation("MXFP4", (Rule(ALL, (Blocks(),)),))


# Compressed tensors -------------------------------------------------------------------------------
#
# compressed-tensors: what llm-compressor writes.


NUMBERS = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
"""Formats of a matrix of numbers and its scales."""
FLOATS4 = (Floats4("mxfp4"), Floats4("nvfp4"))

ORDER = Kind("a text or false", lambda value: TEXT.fits(value) or value is False)
SIZES = re.compile(r"[1-9]\d{0,8}x[1-9]\d{0,8}")
STRUCTURE = Kind(
    "two sizes", lambda found: PAIR.fits(found) or bool(TEXT.fits(found) and SIZES.fullmatch(found))
)
CLASSES = ("Linear", "LinearBase")
"""Class names in targets that mean all products."""


def read_compressed_tensors(config: ConfigReader) -> Quantisation | None:
    """Read compressed-tensors' settings; None if only the KV cache is quantised."""
    # Pass over keys that say nothing about how weights are stored.
    config.pass_over("version", "quantization_status", "global_compression_ratio", "run_compressed")
    config.pass_over("provider")
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
        "compressed-tensors", (*_ignored(config, ignored), *_rules(config, rules)), tuple(remarks)
    )


def _ignored(config: ConfigReader, modules: list[str]) -> Iterator[Rule]:
    for name in modules:
        yield Rule(_pattern(config, "ignore", name))


def _rules(config: ConfigReader, targets: dict[str, Layout]) -> Iterator[Rule]:
    """Order rules: names before patterns, patterns before classes."""
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


def _read_sparsity(config: ConfigReader) -> None:
    """Refuse sparse weights and rotated weights."""
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
    """Read the layout of a group's weights; None: not quantised."""
    form = group.get("format", TEXT.or_none(), None) or form
    if not group.get("weights", TABLE.or_none(), None):
        return None
    weights = group.table("weights")
    bits, kind = weights.size("num_bits"), weights.get("type", TEXT, "int")
    symmetric = weights.flag("symmetric", True)
    weights.get("actorder", ORDER.or_none(), None)  # the file has the order
    weights.only("dynamic", False)
    weights.pass_over("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    block = _block(weights)
    weights.finish(frozenset())
    found = _layout_of(form, bits, kind, symmetric, block)
    if found is None:
        group.refuse(
            "weights", f"weights of {bits} bits and type {kind} in the format {form} cannot be read"
        )
    return found


def _layout_of(
    form: str | None, bits: int, kind: str, symmetric: bool, block: Block
) -> Layout | None:
    """Return the layout of a format; None: the format is not supported."""
    if form == "pack-quantized" and kind == "int" and bits in (4, 8):
        return PackedInts(4 if bits == 4 else 8, block, symmetric)
    if form in NUMBERS and bits <= 8 and kind == "int":
        # Integers of fewer bits have a byte each, too: llm-compressor's W4AFP8 and W4A8.
        return Numbers("int8", block, symmetric=symmetric)
    if form in NUMBERS and bits == 8 and kind == "float" and symmetric:
        return Numbers("fp8_e4m3", block)
    for floats in FLOATS4:
        stated = (floats.form + "-pack-quantized", 4, "float", True, Block(1, floats.group))
        if (form, bits, kind, symmetric, block) == stated:
            return floats
    return None


def _block(weights: ConfigReader) -> Block:
    """Read the size of the blocks that share a scale."""
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
    """Make remarks about activations, which are not quantised whatever the group says."""
    for key in ("input_activations", "output_activations"):
        if not group.get(key, TABLE.or_none(), None):
            continue
        found = group.table(key)
        bits, kind = found.get("num_bits", NUMBER, 8), found.get("type", TEXT, "int")
        yield activations_remark(f"{kind}{bits}")


# AutoRound ----------------------------------------------------------------------------------------
#
# AutoRound's own configuration; the weights are packed in other methods' formats.


OLD_FORMATS = {"gptq": "auto_gptq", "awq": "auto_awq"}
"""Older names of formats, from transformers and older releases of AutoRound."""
STORED_LESS_ONE = {"auto_gptq": True, "auto_round": False, "gptqmodel": False}
"""Formats in which AutoRound packs integers as GPTQ does -> are zero points stored less one."""
GROUPED_FLOATS: dict[tuple[str, int, int | None], Layout] = {
    ("mx_fp", 4, 32): Floats4("mxfp4"),
    ("mx_fp", 8, 32): Numbers("fp8_e4m3", Block(1, 32)),
    ("nv_fp", 4, 16): Floats4("nvfp4"),
}
"""Layouts that AutoRound shares with compressed-tensors, by data type, bits and group."""
DENSE_BITS = 16
"""Bits from which a module is not quantised."""


def read_auto_round(config: ConfigReader) -> Quantisation:
    """Read AutoRound's settings. In `extra_config` modules' names go before patterns."""
    form = config.get("packing_format", TEXT).removeprefix("auto_round:")
    form = OLD_FORMATS.get(form, form)
    floats = _fp8_layouts(config) if form in ("fp8", "fp8_static") else ()
    config.pass_over("backend", *AUTO_ROUND_REMARKS)
    remarks = []
    if config.get("act_bits", SIZE.or_none(), None) is not None:
        kind = config.get("act_data_type", TEXT.or_none(), None) or "int"
        remarks.append(activations_remark(f"{kind}{config.size('act_bits')}"))
    default = _AutoRound(form, floats).read(config)
    rules: dict[bool, list[Rule]] = {True: [], False: []}
    if config.get("extra_config", TABLE.or_none(), None):
        modules = config.table("extra_config")
        for name in modules:
            named = re.fullmatch(r"[\w.]+", name) is not None
            pattern = rf"(?:.*\.)?{re.escape(name)}\Z" if named else f".*?(?:{name})"
            part = modules.table(name)
            layout = default.read(part)
            part.finish(frozenset())
            rules[named].append(Rule(read_pattern(modules, name, pattern), layout.layouts))
    last = Rule(ALL, default.layouts)
    return Quantisation("AutoRound", (*rules[True], *rules[False], last), tuple(remarks))


class _AutoRound(msgspec.Struct, frozen=True):
    """Settings of modules packed in the format `form`."""

    form: str
    floats: tuple[Layout, ...]
    """Layouts of floats of eight bits, the same in the whole file."""
    bits: int | None = None
    group: Any = 128
    kind: str = "int"
    layouts: tuple[Layout, ...] = ()
    """Layouts of the modules; none: not quantised."""

    def read(self, config: ConfigReader) -> _AutoRound:
        """Return these settings, updated by a configuration or an `extra_config` entry."""
        bits = config.size("bits", *[self.bits] * (self.bits is not None))
        kind: str = config.get("data_type", TEXT, self.kind)
        group: Any
        if self.floats:
            config.pass_over("group_size")
            group = None
        else:
            group = read_group(config, "group_size", self.group or -1)
        config.get("sym", FLAG, True)
        config.pass_over(*AUTO_ROUND_ACTIVATIONS)
        layouts: tuple[Layout, ...] = ()
        if bits < DENSE_BITS:
            layouts = self._stored(bits, kind, group)
            if not layouts:
                config.refuse(
                    "bits",
                    f"weights of type {kind}, in groups of {group}, "
                    f"packed as {self.form}, cannot be read",
                )
        return replace(self, bits=bits, group=group, kind=kind, layouts=layouts)

    def _stored(self, bits: int, kind: str, group: int | None) -> tuple[Layout, ...]:
        """Return the layouts of a format; none: the format is not supported."""
        if self.form in STORED_LESS_ONE and kind == "int" and bits in (4, 8):
            return (Gptq(4 if bits == 4 else 8, group, STORED_LESS_ONE[self.form]),)
        if self.form == "auto_awq" and kind == "int" and bits == 4:
            return (Awq(group),)
        if self.form == "llm_compressor":
            found = GROUPED_FLOATS.get((kind, bits, group))
            return () if found is None else (found,)
        return self.floats if (kind, bits) == ("fp", 8) else ()


# Methods ------------------------------------------------------------------------------------------


METHODS: dict[str, Callable[[ConfigReader], Quantisation | None]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}

INSTEAD = (
    f"only those of {', '.join(METHODS)}: take such a version of the model, or the one that is not "
    "quantised"
)

_AS_NAMED = "AQLM BitNet bitsandbytes EETQ HIGGS HQQ Quanto SpQR torchao VPTQ"
OTHERS = {
    **{name.lower(): name for name in names(_AS_NAMED)},
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "fbgemm_fp8": "FBGEMM",
    "fp_quant": "FP-Quant",
    "modelopt": "NVIDIA's ModelOpt",
    "quark": "AMD's Quark",
}
"""Methods that are not supported, with their names in words."""

KEY = "quantization_config"
MLX = "quantization"
"""Key of `config.json` in which MLX describes quantisation."""


def read_quantisation(config: ConfigReader) -> Quantisation | None:
    """Read the storage of the modules from a `config.json`; None: not quantised. Raises
    `UnsupportedModel`, naming the method or the key, if a setting is not supported."""
    if config.get(MLX, TABLE.or_none(), None):
        config.refuse(MLX, f"weights of MLX cannot be read, {INSTEAD}")
    if not config.get(KEY, TABLE.or_none(), None):
        return None
    settings = config.table(KEY)
    method = settings.get("quant_method", TEXT, "") or _unnamed(settings)
    if method not in METHODS:
        what = f"weights of {OTHERS[method]}" if method in OTHERS else "weights of this method"
        settings.refuse("quant_method", f"{what} cannot be read, {INSTEAD}")
    found = METHODS[method](settings)
    settings.finish(frozenset())
    return found


def _unnamed(settings: ConfigReader) -> NoReturn:
    """Refuse a configuration that does not name its method."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if settings.get(key, FLAG, False):
            settings.refuse(key, f"weights of bitsandbytes cannot be read, {INSTEAD}")
    settings.refuse("quant_method", f"it does not say by which method, {INSTEAD}")
