"""Draws the examples' runs on the model smollm2: docs/gallery.md, docs/screens/gallery/*.png.

python scripts/gallery.py     (needs playwright, Debian's chromium and that model)
"""

from __future__ import annotations

import ast
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from playwright.sync_api import FloatRect, Page, ViewportSize, sync_playwright

import rootlace as rl

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
PICTURES = ROOT / "docs" / "screens" / "gallery"
SIZE: ViewportSize = {"width": 1000, "height": 900}
HEAD = """\
# Gallery

This page shows the programs in `examples/` at work on SmolLM2-135M-Instruct (`smollm2`), a real
model of 98 MB. Read it to choose a program to start from, and to learn what so small a model can
do.

Each picture is the run's [trace](language.md#seeing-a-run), drawn by `python scripts/gallery.py`:

- time goes from left to right, and each line is a branch;
- the upper strip of a bar is its prompt, pale where cached;
- below the strip, grey is the time until the first token, blue are sampled tokens, amber forced
  ones, violet scored choices and turquoise tools.

The answers are right, as the tests of the examples check. Each task fits so small a model:
examples precede it, or the text has the answer. Each section names the model's limits. If the
model cannot be downloaded, the examples run on the embedded model, which knows less. `--model`
names another model.
"""


def extract(module: Any) -> rl.ProgramState:
    state: rl.ProgramState = module.extract.run(module.PASSAGES[0])
    return state


def chat(module: Any) -> rl.ProgramState:
    first = module.turn.run("What is the capital of Japan?")
    state: rl.ProgramState = module.turn.run("And the capital of France?", after=first)
    return state


@rl.function
def classify(s: rl.ProgramState, prompt: str, labels: list[str]) -> None:
    s += prompt + rl.select("label", labels)


def few_shot(module: Any) -> rl.ProgramState:
    """Return the program of a task's first row."""
    task = module.read_task(EXAMPLES / "reviews.yaml")
    record = module.evaluate(task).records[0]
    state: rl.ProgramState = classify.run(record.prompt + " ", record.choices)
    return state


RUNS: dict[str, Callable[[Any], rl.ProgramState]] = {
    "quickstart": lambda m: m.ask.run(m.TEXT, m.QUESTIONS),
    "chat": chat,
    "json_extraction": extract,
    "json_service": extract,
    "few_shot_eval": few_shot,
    "judge": lambda m: m.judge.run(m.HOTELS),
    "rag": lambda m: m.answer.run(m.QUESTIONS[0], m.Index(m.DOCUMENTS).find(m.QUESTIONS[0])),
    "tool_agent": lambda m: m.agent.run(m.QUESTIONS[0], temperature=0),
    "self_consistency": lambda m: m.vote.run("Norway", m.VOTES),
    "skeleton_of_thought": lambda m: m.write.run("a good garden"),
    "tree_of_thought": lambda m: m.search.run(m.BEGINNING),
}


def traces(folder: Path) -> None:
    """Write the trace page of each example's run."""
    sys.path.insert(0, str(EXAMPLES))
    with rl.Runtime("smollm2") as runtime:
        rl.set_default_backend(runtime)
        for name, run in RUNS.items():
            module = import_module(name)
            run(module)  # does the runtime's work at the first use
            runtime.flush_cache()
            run(module).trace().save(folder / f"{name}.html")


def shoot(page: Page, trace: Path, picture: Path) -> None:
    """Take a picture of a trace's page."""
    page.set_viewport_size(SIZE)
    page.goto(f"file://{trace}")
    page.add_style_tag(content="main > .row, #theme { display: none }")
    page.wait_for_timeout(200)
    canvas = page.locator("#canvas").bounding_box()
    assert canvas is not None
    bottom = min(canvas["y"] + canvas["height"] + 8, SIZE["height"])
    clip: FloatRect = {"x": 0, "y": 0, "width": SIZE["width"], "height": bottom}
    page.screenshot(path=picture, clip=clip)


def write() -> None:
    parts = [HEAD]
    for name in RUNS:
        docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
        assert docstring is not None
        first, _, *why = docstring.split("\n\n")
        parts.append(
            f"## {name.replace('_', ' ').capitalize().replace('Json', 'JSON')}\n\n{first} "
            f"[`{name}.py`](../examples/{name}.py)\n\n"
            f"![{first}](screens/gallery/{name}.png)\n\n" + "\n\n".join(why) + "\n"
        )
    (ROOT / "docs" / "gallery.md").write_text("\n".join(parts))


@contextmanager
def chromium() -> Iterator[Page]:
    """Open a page in a browser."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser.new_page(viewport=SIZE, color_scheme="light")
        browser.close()


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        traces(Path(folder))
        with chromium() as page:
            for name in RUNS:
                shoot(page, Path(folder) / f"{name}.html", PICTURES / f"{name}.png")
    write()


if __name__ == "__main__":
    main()
