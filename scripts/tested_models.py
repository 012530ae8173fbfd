"""Writes the table of tested families in docs/models.md.

    python -m scripts.tested_models

The families are the registry's; the tests are read from parametrisations that pytest collects.
"""

from __future__ import annotations

import importlib
import inspect
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.decoder import native_decoder
from rootlace.runtime.model.families.reading import Family
from rootlace.runtime.model.families.table import families
from rootlace.runtime.model.gguf.architectures import ARCHITECTURES

# By name: an import would make mypy check the tests, too.
configs = importlib.import_module("tests.model.checkpoints").configs

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- written by scripts/tested_models.py -->\n", "<!-- end -->\n"
COLUMNS = (
    *("native float32", "native bfloat16", "torch float32", "torch bfloat16"),
    "GPU's, interpreted",
    *("quantised checkpoint", "`--quantize`", "GGUF"),
)
Found = Iterator[tuple[str, str, str]]
"""A configuration's name in the tests, a column, and what more is said there."""


def _parity(params: dict[str, Any], module: Any) -> Found:
    yield params["saved"], _kernels(params["model"], "float32"), ""


def _rounded(params: dict[str, Any], module: Any) -> Found:
    yield params["name"], _kernels(params["kernels"], "bfloat16"), ""


def _interpreted(params: dict[str, Any], module: Any) -> Found:
    yield params["name"], "GPU's, interpreted", ""


def _formats(params: dict[str, Any], module: Any) -> Found:
    family = inspect.signature(module.made).parameters["family"].default
    yield family, "quantised checkpoint", f"{len(module.FORMATS)} formats"


def _quantised(params: dict[str, Any], module: Any) -> Found:
    yield params["family"], "quantised checkpoint", module.FAMILIES[params["family"]][0]


def _quantize(params: dict[str, Any], module: Any) -> Found:
    yield params["name"], "`--quantize`", params["codes"]


def _gguf(params: dict[str, Any], module: Any) -> Found:
    yield params["name"], "GGUF", ""


def _gguf_codes(params: dict[str, Any], module: Any) -> Found:
    yield params["name"], "GGUF", params["kind"]


def _kernels(name: str, dtype: str) -> str:
    return f"{'native' if name == 'native' else 'torch'} {dtype}"


SOURCES: dict[tuple[str, str], Callable[[dict[str, Any], Any], Found]] = {
    ("tests/model/test_parity.py", "test_prefill_then_decode"): _parity,
    (
        "tests/model/test_parity.py",
        "test_bfloat16_is_as_close_to_float32_as_transformers",
    ): _rounded,
    (
        "tests/kernels/triton/test_whole_model.py",
        "test_greedy_decoding_is_transformers_own",
    ): _interpreted,
    (
        "tests/model/test_quantised_checkpoints.py",
        "test_weights_are_what_the_format_means",
    ): _formats,
    ("tests/model/test_quantised_checkpoints.py", "test_families"): _quantised,
    ("tests/model/test_rounding.py", "test_tokens_are_those_of_the_rounded_weights"): _quantize,
    ("tests/model/gguf/test_models.py", "test_parity_with_transformers"): _gguf,
    ("tests/model/gguf/test_models.py", "test_quantised_weights"): _gguf_codes,
}
"""The tests that count, and what their parameters say. Each compares with transformers."""


def table(items: Iterable[pytest.Item]) -> str | None:
    """Return the table in Markdown; None if one of the tests was not collected."""
    found: dict[Family, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    seen = set()
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        source = (str(item.path.relative_to(ROOT)), item.originalname)
        if source not in SOURCES:
            continue
        seen.add(source)
        for name, column, detail in SOURCES[source](item.callspec.params, item.module):
            found[_family(item.module, name)][column].add(detail)
    if seen != SOURCES.keys():
        return None
    lines = [f"| `model_type` | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    refused = _refused(found)
    for family in sorted({*_families().values()}, key=lambda one: one.model_types):
        tested = found[family]
        cells = [
            "refused" if (family, one) in refused else _cell(tested.get(one)) for one in COLUMNS
        ]
        lines.append(f"| {', '.join(family.model_types)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(details: set[str] | None) -> str:
    if details is None:
        return ""
    said = ", ".join(sorted(details - {""}))
    return f"tested ({said})" if said else "tested"


def _family(module: Any, name: str) -> Family:
    """Return the family of a configuration that a test knows by this name."""
    config = _configs_of(module)[name]
    if not isinstance(config, PreTrainedConfig):
        config = config()
    return _families()[config.model_type]


@cache
def _configs_of(module: Any) -> Mapping[str, Any]:
    """Return the configurations, or their makers, that a module's tests know."""
    own = getattr(module, "CONFIGS", None) or {}
    if hasattr(module, "stated_by_gguf"):
        own = module.stated_by_gguf()
    return configs() | own


@cache
def _families() -> dict[str, Family]:
    """Return families by their models' types."""
    return {kind: family for family in families().values() for kind in family.model_types}


def _refused(tested: Mapping[Family, Mapping[str, object]]) -> set[tuple[Family, str]]:
    """Return unsupported parts: of native kernels, whose tests are skipped, and of GGUF files."""
    native = set()
    for config in configs().values():
        family = _families()[config.model_type]
        with tempfile.TemporaryDirectory() as folder:
            given = config.to_dict() | {"architectures": family.architectures[:1]}
            (Path(folder) / "config.json").write_text(json.dumps(given, default=str))
            spec = ModelConfig.read(folder).spec
        if native_decoder.why_not(spec, FLOAT32, 16) is None:
            native.add(family)
    readable = {one.model_type for one in ARCHITECTURES.values()}
    found = set()
    for family in _families().values():
        if family not in native:
            found |= {(family, column) for column in COLUMNS if column.startswith("native")}
        if readable.isdisjoint(family.model_types) and "GGUF" not in tested[family]:
            found.add((family, "GGUF"))
    return found


def page(written: str, items: Iterable[pytest.Item]) -> str | None:
    """Return the page with a new table; None as for `table`."""
    made = table(items)
    before, _, rest = written.partition(BEGIN)
    _, _, after = rest.partition(END)
    return None if made is None else f"{before}{BEGIN}{made}{END}{after}"


class _Collected:
    items: Iterable[pytest.Item] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


if __name__ == "__main__":
    collected = _Collected()
    files = sorted({str(ROOT / file) for file, _ in SOURCES})
    pytest.main(["--collect-only", "-qq", "-p", "no:xdist", *files], plugins=[collected])
    new = page(PAGE.read_text("utf-8"), collected.items)
    assert new is not None, "a test that the table names is not there"
    PAGE.write_text(new, "utf-8")
