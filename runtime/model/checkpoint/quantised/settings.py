"""What the configurations of several methods have in common."""

from __future__ import annotations

import re

from rootlace.runtime.model.checkpoint.quantised.patterns import TooManyWays, compiled, shown
from rootlace.runtime.model.families.given import SIZE, TEXTS, Given, Kind

GROUP = Kind("a positive integer or -1", lambda value: value == -1 or SIZE.fits(value))
PAIR = Kind(
    "two positive integers",
    lambda value: type(value) is list and len(value) == 2 and all(map(SIZE.fits, value)),
)
MODULES = Kind(
    "a list of modules",
    lambda value: TEXTS.fits(value) or (type(value) is list and all(map(TEXTS.fits, value))),
)

GPTQ_REMARKS = (
    # How the weights were found.
    "damp_percent",
    "damp_auto_increment",
    "mse",
    "dataset",
    "tokenizer",
    "batch_size",
    "model_seqlen",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "cache_block_outputs",
    "true_sequential",
    "act_group_aware",
    "meta",
    "model_name_or_path",
    "model_file_base_name",
    "pad_token_id",
    "hyb_act",
    "offload_to_disk",
    "offload_to_disk_path",
    # How other programs are to run the model.
    "backend",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "use_cuda_fp16",
    "max_input_length",
)


def read_group(given: Given, key: str, default: int) -> int | None:
    """How many inputs share a scale; None: all of them, which files call -1."""
    group: int = given(key, GROUP, default)
    return None if group == -1 else group


def read_modules(given: Given, key: str) -> bool:
    """Whether modules are listed. Which ones are stored quantised, the file says better."""
    return bool(given(key, MODULES.or_none(), None))


def read_pair(given: Given, key: str) -> tuple[int, int] | None:
    """The sizes of a block."""
    found = given(key, PAIR.or_none(), None)
    return None if found is None else (found[0], found[1])


def read_pattern(given: Given, key: str, pattern: str) -> re.Pattern[str]:
    """A pattern of module names, which `key` has."""
    try:
        return compiled(pattern)
    except TooManyWays as error:
        given.refuse(key, f"{shown(pattern)} might take too long to match: {error}")
    except (re.error, RecursionError, OverflowError) as error:
        given.refuse(key, f"{shown(pattern)} is not a regular expression: {error}")


def activations_remark(kind: str) -> str:
    """For checkpoints whose activations were to be quantised, too."""
    return (
        f"activations are not rounded to {kind}, for which the weights were made: they keep the "
        "precision that they are computed in"
    )
