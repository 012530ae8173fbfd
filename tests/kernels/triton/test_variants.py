"""What is compiled ahead of time speaks of the kernels as they are: every parameter, in order."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import rootlace.kernels.triton as kernels
from rootlace.kernels.triton.launching import Variant

ARCHITECTURES = (80, 90)


def all_variants() -> list[tuple[str, int, Variant]]:
    found = []
    for entry in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{entry.name}")
        if hasattr(module, "variants"):
            for arch in ARCHITECTURES:
                found += [(entry.name, arch, variant) for variant in module.variants(arch)]
    return found


VARIANTS = all_variants()


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
        constant = {key for key, kind in variant.signature.items() if kind == "constexpr"}
        assert constant == variant.constants.keys(), where
        declared = {
            key for key, parameter in parameters.items() if "constexpr" in str(parameter.annotation)
        }
        # What is left out (None) is a constant, too.
        assert declared <= constant, where
        assert all(variant.constants[key] is None for key in constant - declared), where
        assert set(variant.divisible) <= parameters.keys() - constant, where
        for key in variant.divisible:
            assert variant.signature[key][0] in "*iu", where


@pytest.mark.parametrize("name", sorted({name for name, _, _ in VARIANTS}))
def test_variants_have_names_of_their_own(name: str) -> None:
    names = [
        (variant.kernel.fn.__name__, variant.name, arch)
        for module, arch, variant in VARIANTS
        if module == name
    ]
    assert len(names) == len(set(names))
