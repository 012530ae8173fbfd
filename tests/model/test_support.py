"""Decoders compute every field of a spec, or refuse it by name; no field is ignored."""

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import asdict, fields, replace

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.native.packed import FLOAT32
from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.reference.layers import INT4, INT8, ROWS, dequantise, quantise
from rootlace.kernels.weights import Dense, Quantised, Scheme, rows_of, stacked
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.decoder import interface, native_decoder, torch_decoder
from rootlace.runtime.model.decoder.interface import StepInputBuilder
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.decoder.torch_decoder import ReferenceForward
from rootlace.runtime.model.executor.cpu_setup import LoadedModel, on_cpu
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.families import spec as support
from rootlace.runtime.model.families.spec import Mlp, ModelSpec
from rootlace.runtime.model.kv_pool import allocate
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from tests.model.checkpoints import configs, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.native import skip_without

CPU = torch.device("cpu")
TOKENS = [5, 150, 7, 32, 9, 11, 4, 77]
DECODERS = {"reference": interface.SUPPORT, "native": native_decoder.SUPPORT}


class WithSinks(ModelSpec, frozen=True):
    """A feature that no decoder has heard of."""

    sinks: bool = False


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("qwen3")
    save(configs()["qwen3-biased"], folder)
    return ModelConfig.read(folder)


def with_sinks(config: ModelConfig, sinks: bool) -> ModelConfig:
    return replace(config, spec=WithSinks(**asdict(config.spec), sinks=sinks))


def load(config: ModelConfig, kernels: str, weights_of: Any = load_weights) -> LoadedModel:
    executor = ExecutorConfig(model=str(config.path), kernels=kernels)  # type: ignore[arg-type]
    cache = CacheConfig(4, 16)
    return on_cpu(ModelSetup(config, executor, cache, FLOAT32, weights_of=weights_of))


@torch.inference_mode()
def logits(config: ModelConfig, kernels: KernelSet = REFERENCE) -> torch.Tensor:
    """Return the torch decoder's logits after `TOKENS`."""
    rotary = RotaryEmbedding(config, config.spec.max_context, CPU, torch.float32)
    weights = load_weights(config, torch.float32, CPU)
    decoder = torch_decoder.Decoder(config.spec, weights, kernels)
    inputs = StepInputBuilder(config.spec, kernels, rotary, 4, torch.float32, CPU)
    pool = torch.from_numpy(allocate(config, 16, 4, FLOAT32))
    forward = ReferenceForward(decoder, inputs, pool)
    return torch.from_numpy(forward.logits(run(forward)))


@torch.inference_mode()
def run(forward: Any) -> torch.Tensor:
    return forward.run(make_plan([Work(Row(Blocks(16, 4), list(TOKENS)))]))


# ------------------------------------------------------------ refusals


def test_a_feature_that_nobody_knows(config: ModelConfig) -> None:
    odd = with_sinks(config, True)
    assert "sinks True" in str(native_decoder.why_not(odd.spec, FLOAT32, 16))
    assert "sinks True" in str(interface.why_not(odd.spec))
    with pytest.raises(UnsupportedModel, match="sinks True"):
        load(odd, "reference")
    # A model without it runs everywhere.
    plain = with_sinks(config, False)
    assert native_decoder.why_not(plain.spec, FLOAT32, 16) is None
    assert interface.why_not(plain.spec) is None


def test_a_feature_that_only_torch_knows_falls_back(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = {**interface.SUPPORT, **support.known("sinks")}
    monkeypatch.setattr(interface, "SUPPORT", known)
    odd = with_sinks(config, True)
    with caplog.at_level(logging.WARNING):
        assert load(odd, "auto").kernels == "reference"
    assert "reference kernels run" in caplog.text
    assert "sinks True is not known" in caplog.text
    with pytest.raises(InvalidRequest, match=r"kernels 'native': .*sinks True"):
        load(odd, "native")


FEATURES: dict[str, dict[str, Any]] = {
    "attention.head_dim": {"attention": {"head_dim": 258}},
    "attention.scale": {"attention": {"scale": -1.0}},
    "mlp.activation 'silu'": {"mlp": Mlp(96, "silu", gated=False)},
    "mlp.activation 'relu'": {"mlp": {"activation": "relu"}},
    "norm.bias": {"norm": {"bias": True}},
    "norm.placement 'once'": {"norm": {"placement": "once"}},
    "norm.placement 'after'": {"norm": {"placement": "after"}, "parallel": True},
}


def with_feature(config: ModelConfig, feature: dict[str, Any]) -> ModelConfig:
    values = {
        name: replace(getattr(config.spec, name), **value) if isinstance(value, dict) else value
        for name, value in feature.items()
    }
    return replace(config, spec=replace(config.spec, **values))


@pytest.mark.parametrize("path", FEATURES)
def test_what_the_native_decoder_refuses(config: ModelConfig, path: str) -> None:
    reason = native_decoder.why_not(with_feature(config, FEATURES[path]).spec, FLOAT32, 16)
    assert reason is not None
    assert reason.startswith(path)


def test_a_part_of_another_type(config: ModelConfig) -> None:
    class Experts(msgspec.Struct, frozen=True):
        count: int

    spec = replace(config.spec, mlp=Experts(8))  # type: ignore[arg-type]
    for decoder in DECODERS.values():
        assert support.why_not(spec, decoder) == "mlp Experts is not supported"


def with_head(config: ModelConfig, change: Any) -> ModelWeights:
    weights = load_weights(config, torch.float32, CPU)
    return replace(weights, head=change(weights.embedding))


def test_weights_of_an_unknown_kind(config: ModelConfig) -> None:
    weights = with_head(config, lambda matrix: quantise(matrix, Scheme("int8")))
    narrow = replace(REFERENCE, name="narrow", weights=frozenset({"dense"}))
    with pytest.raises(UnsupportedModel, match="narrow kernels have no products of int8"):
        torch_decoder.Decoder(config.spec, weights, narrow)


def test_codes_without_native_kernels_become_numbers(
    config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    skip_without("native")
    weights = load_weights(config, torch.float32, CPU)
    order = torch.arange(config.spec.hidden_size, dtype=torch.int32).flip(0)

    def odd(weight: Any, own: torch.Tensor | None = None) -> Quantised:
        return replace(quantise(weight.matrix, Scheme("int8", 8), weight.bias), order=own)

    def logits_of(change: Any) -> np.ndarray:
        layers = tuple(
            replace(layer, qkv=change(layer.qkv, order), gate_up=change(layer.gate_up))
            for layer in weights.layers
        )
        changed = replace(weights, layers=layers, head=change(weights.head, order))
        model = load(config, "native", lambda *_: changed)
        return model.forward.logits(run(model.forward)).copy()

    expected = logits_of(lambda *given: Dense(dequantise(odd(*given)), given[0].bias))
    assert not caplog.records
    assert np.array_equal(logits_of(odd), expected)
    assert "int8 take the memory of dense ones: groups are not of whole 16 inputs" in caplog.text


# ------------------------------------------------------------ no field is passed over


def paths(spec: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every field's path, and whether it has a default, which every decoder supports."""
    for field in fields(spec):
        yield prefix + field.name, field.default is not msgspec.NODEFAULT
        value = getattr(spec, field.name)
        if isinstance(value, msgspec.Struct):
            yield from paths(value, f"{prefix}{field.name}.")


@pytest.fixture(scope="module")
def specimens(
    config: ModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelConfig, ...]:
    """Make models that together have every part of a spec."""
    folders = [tmp_path_factory.mktemp(name) for name in ("qwen2_moe", "deepseek_v3")]
    for folder in folders:
        save(configs()[folder.name[:-1]], folder)
    return (config, *map(ModelConfig.read, folders))


@pytest.mark.parametrize("name", DECODERS)
def test_every_field_is_declared_or_refused(specimens: tuple[ModelConfig, ...], name: str) -> None:
    known = DECODERS[name]
    all_paths = {path: default for one in specimens for path, default in paths(one.spec)}
    assert known.keys() <= all_paths.keys()
    for path, default in all_paths.items():
        part = path.rpartition(".")[0]
        refused = part not in known and all_paths.get(part, False)  # with all that is in it
        assert path in known or default or refused


class Recorder:
    """A spec that remembers which of its fields are read."""

    def __init__(self, value: Any, seen: set[str], prefix: str = "") -> None:
        self._value, self._seen, self._prefix = value, seen, prefix

    def __getattr__(self, name: str) -> Any:
        path, value = self._prefix + name, getattr(self._value, name)
        self._seen.add(path)
        is_part = isinstance(value, msgspec.Struct)
        return Recorder(value, self._seen, f"{path}.") if is_part else value


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_declared_is_read(
    specimens: tuple[ModelConfig, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that a decoder supports with any value affects its results."""
    skip_without(name)
    known = [one for one in specimens if support.why_not(one.spec, DECODERS[name]) is None]
    monkeypatch.setattr(support, "why_not", lambda *_: None)
    seen: set[str] = set()
    for one in known:
        model = load(replace(one, spec=Recorder(one.spec, seen)), name)  # type: ignore[arg-type]
        model.forward.logits(run(model.forward))
    declared = {path for path, values in DECODERS[name].items() if not values}
    assert declared - seen == set()


# ------------------------------------------------------------ features of the torch decoder


def test_logits_are_capped(config: ModelConfig) -> None:
    plain = logits(config).double()
    capped = logits(with_feature(config, {"logit_soft_cap": 2.0})).double()
    assert torch.allclose(capped, 2.0 * torch.tanh(plain / 2.0), atol=1e-5)
    assert plain.abs().max() > 2.0


def test_scores_are_capped(config: ModelConfig) -> None:
    seen: list[tuple[float, float]] = []

    def spy(*given: Any, **options: Any) -> Any:
        seen.append((options["scale"], options["soft_cap"]))
        return REFERENCE.paged_attention(*given, **options)

    feature = {"attention": {"soft_cap": 5.0, "scale": 0.3}}
    logits(with_feature(config, feature), replace(REFERENCE, paged_attention=spy))
    assert seen == [(0.3, 5.0)] * config.spec.num_layers


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("scheme", [INT8, ROWS, Scheme("int8", 16), INT4], ids=str)
def test_quantised_weights_are_multiplied_by(
    config: ModelConfig, scheme: Scheme, kernels: str
) -> None:
    """Products equal those of dense weights of equal values, also for parts with their own
    schemes."""
    skip_without(kernels)
    weights = load_weights(config, torch.float32, CPU)
    half = config.spec.mlp.inner_size
    found = []
    for dense in (False, True):

        def product(weight: Any, scheme: Scheme = scheme, dense: bool = dense) -> Any:
            quantised = quantise(weight.matrix, scheme, weight.bias)
            return Dense(dequantise(quantised), weight.bias) if dense else quantised

        def apart(weight: Any, rows: int, product: Any = product) -> Any:
            first = torch.arange(weight.shape[0]) < rows
            schemes = (scheme, Scheme("int8"))
            parts = [
                product(rows_of(weight, one.nonzero().flatten()), own)
                for one, own in zip((first, ~first), schemes, strict=True)
            ]
            return stacked(parts)

        layers = tuple(
            replace(
                layer,
                qkv=apart(layer.qkv, 32),
                output=product(layer.output),
                gate_up=apart(layer.gate_up, half),
                down=product(layer.down),
            )
            for layer in weights.layers
        )
        changed = replace(weights, layers=layers, head=product(weights.head))
        model = load(config, kernels, lambda *_, changed=changed: changed)
        found.append(model.forward.logits(run(model.forward)).copy())
    if kernels == "native":
        assert np.array_equal(*found)
    else:  # torch adds up parts of a matrix in another order
        np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)
