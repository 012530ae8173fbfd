"""What the configurations of several methods have in common."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from rootlace.runtime.model.families.config_reader import SIZE, TEXTS, ConfigReader, Kind

# Patterns -----------------------------------------------------------------------------------------
#
# Patterns of module names, of which a configuration may have only such as match in little time.
#
# A regular expression may try more ways to match a name than anybody waits for: ways multiply where
# a repetition stands in another, and where alternatives that are repeated match the same text.


LONGEST = 1000
"""Characters of a pattern."""
SHOWN = 60
"""Characters of a pattern that a message has."""
MOST = 5_000_000
"""Ways to match a name."""
NAME = 64
"""No module's name is longer."""
DIGITS = 4
"""Nor are numbers in it."""
FEW = 8
"""A choice may be repeated so many times."""


class TooManyWays(ValueError):
    """A pattern that might take too long."""


@dataclass(frozen=True)
class Ways:
    """A bound of how often a pattern may be tried at one place: `choices` are independent ones, and
    `repetitions` those that may end at any character of a name."""

    choices: int = 1
    repetitions: int = 0

    def total(self) -> int:
        return self.choices * math.comb(NAME + self.repetitions, self.repetitions)


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern, if it matches module names in little time. Raises `TooManyWays` or
    `re.error`, saying why not."""
    if len(pattern) > LONGEST:
        raise TooManyWays(f"it has more than {LONGEST} characters")
    if _sequence(_parser.parse(pattern)).total() > MOST:
        raise TooManyWays("it has too many repetitions or alternatives")
    return re.compile(pattern)


def shown(pattern: str) -> str:
    """The pattern, cut where it is long."""
    return repr(pattern if len(pattern) <= SHOWN else pattern[:SHOWN] + "...")


def _sequence(items: Iterable[tuple[Any, Any]]) -> Ways:
    choices, repetitions = 1, 0
    for operation, argument in items:
        found = _item(str(operation), argument)
        choices, repetitions = choices * found.choices, repetitions + found.repetitions
        if choices > MOST:
            raise TooManyWays("it has too many alternatives")
    return Ways(choices, repetitions)


def _either(branches: Iterable[Any]) -> Ways:
    found = [_sequence(branch) for branch in branches if branch is not None]
    return Ways(sum(one.choices for one in found), max(one.repetitions for one in found))


def _item(operation: str, argument: Any) -> Ways:
    match operation:
        case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN" | "AT" | "GROUPREF" | "FAILURE":
            return Ways()
        case "SUBPATTERN":
            return _sequence(argument[3])
        case "ASSERT" | "ASSERT_NOT":
            return _sequence(argument[1])
        case "ATOMIC_GROUP":
            return _sequence(argument)
        case "BRANCH":
            return _either(argument[1])
        case "GROUPREF_EXISTS":
            return _either(argument[1:])
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return _repeated(*argument)
    raise TooManyWays(f"{operation} is not known")


def _repeated(least: int, most: int, body: Any) -> Ways:
    ways = _sequence(body)
    if most <= 1:
        return Ways(ways.choices + (most - least), ways.repetitions)
    if body.getwidth()[0] == 0:
        raise TooManyWays("what is repeated in it may be nothing")
    if ways.repetitions:
        raise TooManyWays("it has a repetition in a repetition")
    if ways.choices > 1:
        if most > FEW:
            raise TooManyWays("it has a choice in a repetition")
        return Ways((ways.choices + 1) ** most)
    if least == most:
        return Ways()
    if _is_digit(body):
        return Ways(1 + min(most - least, DIGITS))
    return Ways(1 + most - least) if most - least < FEW else Ways(1, 1)


def _is_digit(body: Any) -> bool:
    """Whether it matches one digit and nothing else."""
    if len(body) != 1 or str(body[0][0]) != "IN":
        return False
    ranges = [(str(operation), argument) for operation, argument in body[0][1]]
    return all(
        (operation == "CATEGORY" and str(argument) == "CATEGORY_DIGIT")
        or (operation == "RANGE" and chr(argument[0]).isdigit() and chr(argument[1]).isdigit())
        or (operation == "LITERAL" and chr(argument).isdigit())
        for operation, argument in ranges
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


def read_group(config: ConfigReader, key: str, default: int) -> int | None:
    """How many inputs share a scale; None: all of them, which files call -1."""
    group: int = config.get(key, GROUP, default)
    return None if group == -1 else group


def read_modules(config: ConfigReader, key: str) -> bool:
    """Whether modules are listed. Which ones are stored quantised, the file says better."""
    return bool(config.get(key, MODULES.or_none(), None))


def read_pair(config: ConfigReader, key: str) -> tuple[int, int] | None:
    """The sizes of a block."""
    found = config.get(key, PAIR.or_none(), None)
    return None if found is None else (found[0], found[1])


def read_pattern(config: ConfigReader, key: str, pattern: str) -> re.Pattern[str]:
    """A pattern of module names, which `key` has."""
    try:
        return compiled(pattern)
    except TooManyWays as error:
        config.refuse(key, f"{shown(pattern)} might take too long to match: {error}")
    except (re.error, RecursionError, OverflowError) as error:
        config.refuse(key, f"{shown(pattern)} is not a regular expression: {error}")


def activations_remark(kind: str) -> str:
    """For checkpoints whose activations were to be quantised, too."""
    return (
        f"activations are not rounded to {kind}, for which the weights were made: they keep the "
        "precision that they are computed in"
    )
