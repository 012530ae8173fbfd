"""Variants compiled ahead of time name the kernels' parameters: every one, in order."""

from __future__ import annotations

import inspect

import pytest

from scripts.kernel_launches import variants

ARCHITECTURES = (80, 90)
VARIANTS = [
    (module.rpartition(".")[2], arch, variant)
    for arch in ARCHITECTURES
    for module, found in variants(arch).items()
    for variant in found
]


def test_every_kernel_module_has_variants() -> None:
    names = {name for name, _, _ in VARIANTS}
    assert {"layers", "kv_storage"} <= names


@pytest.mark.parametrize("name", sorted({name for name, _, _ in VARIANTS}))
def test_variants_describe_their_kernels(name: str) -> None:
    for module, arch, variant in VARIANTS:
        if module != name:
            continue
        where = f"{variant.kernel.fn.__name__} ({variant.name}), sm_{arch}"
        parameters = inspect.signature(variant.kernel.fn).parameters
        assert list(variant.signature) == list(parameters), where
        assert not variant.types.keys() & variant.constants.keys(), where
        assert {key.partition(".")[0] for key in variant.kinds} == parameters.keys(), where
        constant = variant.constants.keys()
        declared = {
            key for key, parameter in parameters.items() if "constexpr" in str(parameter.annotation)
        }
        # What is left out (None) is a constant, too.
        assert declared <= constant, where
        assert all(variant.constants[key] is None for key in constant - declared), where
        assert set(variant.divisible) <= variant.types.keys(), where
        for key in variant.divisible:
            assert variant.types[key][0] in "*iu", where


@pytest.mark.parametrize("name", sorted({name for name, _, _ in VARIANTS}))
def test_variants_have_names_of_their_own(name: str) -> None:
    names = [
        (variant.kernel.fn.__name__, variant.name, arch)
        for module, arch, variant in VARIANTS
        if module == name
    ]
    assert len(names) == len(set(names))
