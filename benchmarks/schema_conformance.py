"""Are JSON schemas enforced exactly? Walks known valid and invalid instances through our matchers.

    python -m benchmarks.schema_conformance FOLDER --json FILE

FOLDER holds JSON files: objects with `schema` and `tests` (as JSONSchemaBench's mask benchmark has
them), or arrays of groups of them (as the JSON-Schema-Test-Suite has them); a test has `data` and
`valid`. Verdicts are not believed but checked with `jsonschema`, formats included: where it
disagrees with a test's label, or cannot say, the instance is left out and counted.

An instance counts as accepted when every token of its compact JSON text is taken and the text may
end there. Accepting an invalid one is an error of ours. Refusing a valid one is not by itself:
properties come in the schema's order, and only one spelling of a value is generated. At each token
the mask is asked for, too: `given up` counts schemas whose automaton and llguidance did not agree.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for
from rich.console import Console
from rich.progress import track

from benchmarks.common import Report, new_parser, percentile
from benchmarks.constrained.engines import load_tokenizer
from rootlace.runtime.assets import demo_model
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.checked_backend import CheckedGrammar
from rootlace.runtime.structured.llguidance_backend import HybridGrammar
from rootlace.runtime.structured.vocabulary.vocabulary import words_of
from rootlace.wire.errors import InvalidConstraint


def groups(folder: Path, sample: int | None) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yield (name, schema, tests) of each schema in the folder's files, or in `sample` of them."""
    paths = sorted(folder.rglob("*.json"))
    if sample is not None and sample < len(paths):
        paths = sorted(random.Random(0).sample(paths, sample))
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        for index, group in enumerate(content if isinstance(content, list) else [content]):
            if isinstance(group, dict) and "schema" in group:
                name = f"{path.stem}[{index}]" if isinstance(content, list) else path.stem
                yield name, group["schema"], group.get("tests", [])


def verdict(schema: Any, instance: Any) -> bool | None:
    """Return whether `instance` is valid; None if jsonschema cannot tell (remote references)."""
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = validator.FORMAT_CHECKER
    try:
        return bool(validator(schema, format_checker=checker).is_valid(instance))
    except Exception:
        return None


def accepts(grammar: Any, compiler: GrammarCompiler, tokenizer: Any, instance: Any) -> bool:
    text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    matcher = grammar.matcher()
    mask = np.zeros(words_of(compiler.vocabulary.size), np.int32)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if matcher.mask_row() is None:
            matcher.fill_bitmask(mask)
        else:
            matcher.prepare_mask()
        if not matcher.advance(token_id):
            return False
    return bool(matcher.is_accepting())


def gave_up(grammar: Any) -> bool:
    """Whether the grammar's automaton is no longer used, because llguidance's masks differed."""
    inner = grammar.inner if isinstance(grammar, CheckedGrammar) else grammar
    return isinstance(inner, HybridGrammar) and not inner.trusted


def keyword_of(message: str) -> str:
    """Return the keyword of a refusal: the last part of its JSON pointer, or its first words."""
    pointer = re.search(r"#(/[^\s:,]*)?", message)
    return (pointer[0].rsplit("/", 1)[-1] if pointer else message[:40]) or "#"


def main() -> None:
    parser = new_parser("schema_conformance", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, metavar="N", help="N files drawn from the folder")
    parser.add_argument("--tokenizer", type=Path, default=demo_model())
    arguments = parser.parse_args()
    report = Report("schema_conformance", arguments)
    tokenizer = load_tokenizer(arguments.tokenizer)
    compiler = GrammarCompiler(tokenizer)
    count: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    backends: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    compiles: list[float] = []
    for name, schema, tests in track(
        list(groups(arguments.folder, arguments.sample)), transient=True
    ):
        count["schemas"] += 1
        verdicts = [(test, verdict(schema, test["data"])) for test in tests]
        count["unsure"] += sum(found != test["valid"] for test, found in verdicts)
        known = [(test["data"], found) for test, found in verdicts if found == test["valid"]]
        satisfiable = any(found for _, found in known)
        count["satisfiable"] += satisfiable
        start = time.process_time()
        try:
            grammar = compiler.compile(json_schema=schema)
        except InvalidConstraint as error:
            count["refused"] += 1
            if satisfiable:
                count["satisfiable refused"] += 1
                refused[keyword_of(str(error))] += 1
                wrong.append({"name": name, "refused": str(error)[:300]})
            continue
        finally:
            compiles.append((time.process_time() - start) * 1e3)
        backends[grammar.backend] += 1
        for instance, valid in known:
            accepted = accepts(grammar, compiler, tokenizer, instance)
            count["valid" if valid else "invalid"] += 1
            count["valid accepted" if valid else "invalid accepted"] += accepted
            if accepted and not valid:
                wrong.append({"name": name, "accepted": instance})
        if gave_up(grammar):
            count["given up"] += 1
            wrong.append({"name": name, "given up": True})
    console = Console()
    for key, value in count.items():
        console.print(f"{value:>7}  {key}")
    console.print("backends:", dict(backends))
    console.print("satisfiable but refused, by keyword:", dict(refused))
    console.print(
        f"compile, CPU ms: p50 {percentile(compiles, 0.5):.2f}, "
        f"p99 {percentile(compiles, 0.99):.1f}, max {max(compiles):.0f}"
    )
    for case in wrong[:20]:
        console.print(case)
    report.found |= {
        "folder": arguments.folder.name,
        "counts": dict(count),
        "backends": dict(backends),
        "refused": dict(refused),
        "compile_ms": {q: percentile(compiles, q / 100) for q in (50, 99, 100)},
        "cases": wrong,
    }
    report.write()


if __name__ == "__main__":
    main()
