"""Sampling parameters are described once (`rootlace.wire.sampling`); everything else follows."""

import ast
import inspect
import math
import pydoc
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from unittest.mock import create_autospec

import msgspec
import numpy as np
import pytest

import rootlace as rl
from rootlace.kernels.native.sampling import declared_columns
from rootlace.language import sampling
from rootlace.language.expressions import gen
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.model import sampler
from rootlace.runtime.scheduler.request import RequestState
from rootlace.runtime.server.http.request_fields import sampling_fields, sglang_names, with_sampling
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import CONSTRAINT_OPTIONS
from rootlace.wire.sampling import (
    PARAMETERS,
    TUNED,
    Api,
    Parameter,
    SamplingKeywords,
    SamplingParams,
    with_defaults,
)
from tests.native import native_library

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("frontend", "runtime", "kernels")


def example(parameter: Parameter) -> Any:
    """A sensible value that is not the default."""
    kind, allowed = parameter.type, parameter.range
    if kind is bool:
        return not parameter.default
    if get_origin(kind) is dict:
        return {1: 0.5}
    if get_origin(kind) is tuple:
        return ("x",) if parameter.single is str else (1, 2)
    assert allowed is not None, f"{parameter.name} has no range"
    if kind is float:
        assert allowed.high is not None
        return (max(allowed.low, -1.0) + min(allowed.high, 2.0)) / 2 + 0.25
    return int(allowed.low) + 3 if allowed.low >= 0 else 3


each = pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=list(PARAMETERS))


@each
def test_programs_may_use_every_name_of_it(parameter: Parameter) -> None:
    for name in (parameter.name, *parameter.aliases):
        found = sampling.normalise({name: example(parameter)}, "gen()")
        assert found == {parameter.name: example(parameter)}
        if name in SamplingKeywords.__annotations__ or name == parameter.name:
            options = gen("x", **{name: example(parameter)}).options  # type: ignore[union-attr]
            assert options == found


def test_programs_say_what_they_name() -> None:
    """So that a server whose model recommends otherwise knows that they mean it."""
    named = sampling.normalise({"temperature": 1.0, "top_p": 0.5, "top_k": None}, "gen()")
    own = sampling.normalise({"repetition_penalty": 1.0}, "gen()")
    assert sampling.resolve({}, {}).params.given == ()
    params = sampling.resolve(named, own).params
    assert params.given == ("temperature", "repetition_penalty")
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    defaults = dict.fromkeys(TUNED, 0.25) | {"top_k": 7, "max_tokens": 1}
    found = with_defaults(there, defaults)
    assert (found.temperature, found.top_p, found.repetition_penalty) == (1.0, 0.5, 1.0)
    assert (found.top_k, found.min_p, found.max_tokens) == (7, 0.25, 128)


@each
def test_it_travels(parameter: Parameter) -> None:
    params = msgspec.convert({parameter.name: example(parameter)}, SamplingParams)
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert getattr(there, parameter.name) == example(parameter)


@each
def test_rows_wait_for_the_tokens_that_it_depends_on(parameter: Parameter) -> None:
    """A row that is sampled by all tokens before cannot be sampled ahead (see `SampleRow.late`)."""
    params = SamplingParams(**{"seed": 0, parameter.name: example(parameter)})
    request = EngineRequest(1, np.zeros(3, np.int32), params)
    sequence = RequestState(request, None, 1, jumps=False, arrived=0.0, max_length=9)
    assert sequence.penalised == parameter.history


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    pass


@each
@pytest.mark.parametrize("api", get_args(Api))
def test_bodies_have_its_fields(parameter: Parameter, api: Api) -> None:
    kind = with_sampling(api)(_Body)
    for name in parameter.fields(api):
        given = {name: example(parameter)}
        body = msgspec.json.decode(msgspec.json.encode(given), type=kind)
        assert sampling_fields(body, api) == {parameter.name: example(parameter)}
        assert sampling_fields(msgspec.convert({name: None}, kind), api) == {}
    if parameter.single is not None and parameter.fields(api):
        body = msgspec.convert({parameter.fields(api)[0]: "alone"}, kind)
        assert sampling_fields(body, api) == {parameter.name: ("alone",)}


def test_the_first_name_that_asks_for_something_counts() -> None:
    openai, generate = with_sampling("openai")(_Body), with_sampling("generate")(_Body)
    both = msgspec.convert({"sampling_seed": 0, "seed": 5}, generate)
    assert sampling_fields(both, "generate") == {"seed": 0}
    for pair in ((True, False), (False, True)):
        given = dict(zip(("no_stop_trim", "include_stop_str_in_output"), pair, strict=True))
        assert sampling_fields(msgspec.convert(given, openai), "openai") == {"no_stop_trim": True}
    assert sampling_fields(msgspec.convert({"top_k": 0}, openai), "openai") == {"top_k": 0}


def test_sglangs_names_are_those_that_differ() -> None:
    assert sglang_names() == {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "logprobs": "return_logprob",
        "top_logprobs": "top_logprobs_num",
        "prompt_logprobs_from": "logprob_start_len",
    }


@each
def test_what_is_out_of_range_is_refused(parameter: Parameter) -> None:
    if parameter.range is None:
        return
    allowed, is_mapping = parameter.range, get_origin(parameter.type) is dict
    wrong: list[float] = [allowed.low - 1] if allowed.low - 1 != allowed.off else [allowed.low - 2]
    if allowed.high is not None:
        wrong.append(allowed.high + 1)
    if is_mapping or parameter.type is float:
        wrong.append(math.nan)
    for value in wrong:
        given: Any = {7: value} if is_mapping else value
        with pytest.raises(ValueError, match=rf"^{parameter.name}\S* must"):
            SamplingParams(**{parameter.name: given})
    with pytest.raises(InvalidRequest, match=parameter.name):
        # (Below both `off` and sglang's `logprob_start_len=-1`, "only the output".)
        given = {7: math.nan} if is_mapping else wrong[0] - 2
        sampling.normalise({parameter.name: given}, "gen()")
    for edge in {allowed.low, allowed.high, allowed.off} - {None}:
        given = {7: edge} if is_mapping else edge
        SamplingParams(**{"max_tokens": None, parameter.name: given})


def test_type_checkers_know_the_keywords() -> None:
    """What `gen` takes by position stands in its signature, everything else in the dictionary."""
    known = get_type_hints(SamplingKeywords)
    positional = {"max_tokens", "min_tokens", "n", "stop", "stop_token_ids"}
    assert known.keys() <= PARAMETERS.keys() | sampling.ALIASES.keys()
    # `prompt_logprobs_from` is asked for as `logprob_start_len`.
    assert PARAMETERS.keys() - known.keys() == positional | {"prompt_logprobs_from"}
    for name, hint in known.items():
        parameter = PARAMETERS[sampling.ALIASES.get(name, name)]
        if get_origin(parameter.type) is None:
            assert hint | parameter.type | None == hint


@pytest.mark.parametrize("function", [rl.gen, rl.gen_int, rl.gen_string])
def test_help_lists_the_keywords(function: Any) -> None:
    """All but `prompt_logprobs_from`, and `gen_int`'s `dtype` is given."""
    shown = inspect.signature(function).parameters
    inspect.signature(function).bind(max_new_tokens=3)
    assert create_autospec(function)(max_new_tokens=3)  # sglang's names are taken too
    expected = PARAMETERS.keys() - {"prompt_logprobs_from"} | set(CONSTRAINT_OPTIONS)
    if function is rl.gen:
        expected |= set(sampling.SOURCES)
    assert not expected - shown.keys()
    given = {name: None for name in shown if name not in ("choices", "choices_method", "options")}
    assert function(**given) == function()  # each may be given
    printed = pydoc.plain(pydoc.render_doc(function))
    assert "temperature: float | None = None" in printed


# ---------------------------------------------------------------- where a parameter has to be known

# What a new parameter that acts on logits is added to, beside its test. (All interfaces, the
# sampler's arrays and what kernels are given follow from the description.)
PLACES = {
    "the description": ("frontend/wire/sampling.py",),
    "the specification": ("kernels/reference/*.py",),
    "the Triton kernel": ("kernels/triton/*.py",),
    "the native kernel": ("kernels/native/**/*.*",),
}
TESTS = {"the kernels' tests": ("tests/kernels/**/*.py", "tests/model/*.py")}


@cache
def words_of(path: Path) -> frozenset[str]:
    """The names that a source file uses; comments and docstrings do not count."""
    source = path.read_text()
    if path.suffix != ".py":
        return frozenset(re.findall(r"\w+", re.sub(r"//.*", "", source)))
    found = set()
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name"):
            found.add(getattr(node, field, None))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(name for name in found if isinstance(name, str) and name.isidentifier())


def missing_places(name: str) -> list[str]:
    found = []
    for place, patterns in (PLACES | TESTS).items():
        files = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
        paths = [path for path in files if path.suffix != ".pyc"]
        words = {word for path in paths for word in words_of(path)}
        if name not in words:
            found.append(f"{name} is missing in {place} ({', '.join(patterns)})")
    return found


@each
def test_every_kernel_knows_the_numbers_that_act_on_logits(parameter: Parameter) -> None:
    if parameter.tuned:
        missing = missing_places(parameter.name)
        assert not missing, "\n".join(missing)
        assert parameter in (sampler.PENALTIES if parameter.history else sampler.DRAWS)


@pytest.mark.parametrize(("name", "most"), [("repetition_penalty", 4), ("min_p", 5)])
def test_a_parameter_is_named_in_few_files(name: str, most: int) -> None:
    """All files of the product that a new penalty, or a new cut, has to be written into."""
    patterns = (f"{folder}/**/*.{kind}" for folder in PRODUCT for kind in ("py", "cpp", "h"))
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    found = [str(path.relative_to(ROOT)) for path in paths if name in words_of(path)]
    assert len(found) <= most, found


def test_native_kernels_read_the_parameters_that_are_described() -> None:
    library = native_library()
    read = declared_columns(library.rl_penalties()), declared_columns(library.rl_pick_params())
    described = (sampler.PENALTIES, sampler.DRAWS)
    for columns, parameters in zip(read, described, strict=True):
        types = {p.name: np.dtype(np.float64 if p.type is float else np.int32) for p in parameters}
        assert columns == types


def test_what_is_missing_is_told() -> None:
    assert len(PLACES) + 1 <= 5
    assert missing_places("top_" + "a") == [
        f"top_a is missing in {place} ({', '.join(patterns)})"
        for place, patterns in (PLACES | TESTS).items()
    ]
