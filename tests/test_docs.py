"""Documents: what they link to and name in code is there, and references are whole."""

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

import rootlace as rl
import rootlace.testing
from rootlace.cli.app import app
from rootlace.evaluation.questions import METRICS
from rootlace.evaluation.task import FORMATS, Judge, Shots, Task
from rootlace.runtime.config import RuntimeConfig, settings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LANGUAGE, EVALUATION, REFERENCE = (
    DOCS / f"{name}.md" for name in ("language", "evaluation", "reference")
)
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A file of ours as it is named in running text: `runtime/cache/radix_tree.py`.
NAMED = re.compile(r"`((?:frontend|runtime|kernels|benchmarks|tests|examples|scripts)/[\w./-]+)`")


def headings(path: Path) -> set[str]:
    """The anchors that a document's headings make."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def missing(document: Path) -> list[str]:
    text = document.read_text()
    found = []
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in headings(path)):
            found.append(target)
    for name in NAMED.findall(text):
        if not any((ROOT / f"{name}{suffix}").exists() for suffix in ("", ".py", ".cpp")):
            found.append(name)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_named_is_there(document: Path) -> None:
    assert not missing(document)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One title\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#one-title) [b](other.md#another) [c](none.md) `runtime/no/such.py`\n"
    )
    assert missing(page) == ["other.md#another", "none.md", "runtime/no/such.py"]


# ---------------------------------------------------------------- options

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
OTHERS = {
    *("--model-path", "--tool-call-parser", "--tp-size", "--sampling-defaults"),  # SGLang's server
    *("--override-generation-config", "--enable-prefix-caching"),  # vLLM's
    *("--constrained-json", "--no-build-isolation", "--no-deps", "--index-url"),  # SGLang's, pip's
    *("--merge", "--gpus", "--build", "--build-arg", "--now", "--from-file"),  # programs of systems
    *("--ignore", "--timeout", "--hypothesis-profile"),  # pytest's
}
"""Options of other programs that documents name."""


def options_of(command: Any) -> Iterator[str]:
    """All options of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from options_of(below)


@functools.cache
def known_options() -> set[str]:
    """Those of the command line, and of our benchmarks and scripts."""
    known = {"--help", *options_of(app), *OTHERS}
    for folder in (
        "benchmarks",
        "scripts",
        "examples",
        "frontend/testing",
        "tests/gpu",
        "tests/deterministic",
    ):
        for path in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'\w\(\s*"(--[a-z0-9-]+)"', path.read_text()))
    return known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_option_named_exists(document: Path) -> None:
    text = document.read_text()
    assert not sorted({*OPTION.findall(text)} - known_options())


def test_an_option_that_does_not_exist_is_seen() -> None:
    named = {*OPTION.findall("`--cache-disk`, `--cache-disc-gb 3`, a--b, --no-cache")}
    assert named - known_options() == {"--cache-disc-gb"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_keyword_given_to_a_runtime_exists(document: Path) -> None:
    """Blocks of code run; a keyword in the text of a page does not."""
    known = {name for setting in settings(RuntimeConfig) for name in setting.names}
    known |= {*inspect.signature(rl.Runtime.__init__).parameters}
    given = re.findall(r"`(?:rl\.|rootlace\.)?Runtime\(([^`]*)\)`", document.read_text())
    names = {name for one in given for name in re.findall(r"(?:^|[ ,(])(\w+)=", one)}
    assert not sorted(names - known)


# ---------------------------------------------------------------- what a reference has to name


def test_the_page_of_evaluation_names_every_key() -> None:
    text = EVALUATION.read_text()
    wanted = {field.name for kind in (Task, Shots, Judge) for field in fields(kind)}
    wanted |= {*FORMATS, *METRICS} - {"questions"}
    assert not [name for name in sorted(wanted) if not re.search(rf"\b{name}\b", text)]


def test_the_languages_page_names_everything() -> None:
    text = LANGUAGE.read_text()
    wanted = {name for name in rl.__all__ if name.islower()} - {"function", "__version__"}
    wanted |= {"Runtime", "Engine", "State", "Checkpoint", "Cache", "Trace", "Tool", "ProgramError"}
    wanted |= {"Timeline"}
    for called in (rl.gen, rl.select, rl.Function.run_batch, rl.best_of, rl.beam, rl.majority):
        wanted |= set(inspect.signature(called).parameters)
    for kind in (rl.ProgramState, rl.Forks):
        wanted |= {name for name in dir(kind) if not name.startswith("_")}
    wanted -= {"self", "name", "s", "step", "kwargs", "options", "batch", "append", "branch"}
    wanted -= {"index", "count"}  # of every sequence
    assert not [name for name in sorted(wanted) if not re.search(rf"\b{name}\b", text)]


def test_the_reference_has_every_public_name() -> None:
    found = re.findall(r"^\.\. auto\w+:: rootlace\.([\w.]+)$", REFERENCE.read_text(), re.MULTILINE)
    named = [name.rpartition(".")[2] for name in found]
    assert sorted([*named, "RootlaceError"]) == sorted(  # which is among the errors
        {*rl.__all__, *rootlace.testing.__all__, "errors"} - {"__version__"}
    )


def test_the_list_of_findings_has_every_script() -> None:
    listed = re.findall(r"^\| `(.+\.sh)` \|", (ROOT / "findings/README.md").read_text(), re.M)
    assert listed == sorted(path.name for path in (ROOT / "findings").glob("*.sh"))


def test_the_site_has_every_page() -> None:
    index = DOCS / "index.md"
    linked = {target.partition("#")[0] for target in LINK.findall(index.read_text())}
    assert {page.name for page in DOCS.glob("*.md")} - {index.name} <= linked


# ---------------------------------------------------------------- the drawing and the tour


def test_the_drawing_of_the_data_path_names_files_that_are_there() -> None:
    drawing = (DOCS / "architecture.md").read_text().split("```")[1]
    named = set(re.findall(r"[\w/]+\.py", drawing)) - {"program.py"}
    assert len(named) > 10
    files = [
        f"/{path.relative_to(ROOT)}"
        for top in ("frontend", "runtime")
        for path in (ROOT / top).rglob("*.py")
    ]
    assert not [
        name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)
    ]


def stops(text: str) -> list[str]:
    """The numbered items of a section, each as one text."""
    return [
        item.replace("\n", " ") for item in re.findall(r"^\d+\. (?:.|\n(?!\d+\.|\n))+", text, re.M)
    ]


def unknown(stop: str) -> list[str]:
    """The names in code of a stop that none of the files it links to has."""
    linked = [ROOT / target.removeprefix("../") for target in LINK.findall(stop)]
    source = "\n".join(path.read_text() for path in linked if path.suffix in (".py", ".cpp"))
    plain = LINK.sub("", re.sub(r"\[[^]]*\]", "", stop))
    names = re.findall(r"`([A-Za-z_][\w.]*)`", plain)
    return [
        name
        for name in names
        if any(not re.search(rf"\b{part}\b", source) for part in name.split("."))
    ]


def test_the_tour_is_short_and_names_what_is_there() -> None:
    token, schema = (DOCS / "tour.md").read_text().split("## The path of a schema")
    ways = [stops(token), stops(schema)]
    assert [0 < len(way) <= most for way, most in zip(ways, (15, 6), strict=True)] == [True, True]
    assert [found for way in ways for stop in way if (found := unknown(stop))] == []


def test_a_name_that_is_gone_is_seen() -> None:
    stop = "1. [`queue.py`](../runtime/scheduler/queue.py). `ClientQueue.gone` and `WaitingQueue`."
    assert unknown(stop) == ["ClientQueue.gone"]
