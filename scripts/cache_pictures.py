"""Draws docs/screens/cache/*.png: runs the code of docs/cache.md and takes its pictures.

    python scripts/cache_pictures.py     (needs playwright and Debian's chromium)

A picture follows the block after which it is taken: `tree-NAME.png` is the server's cache,
`run-NAME.png` the trace of the state in the variable NAME.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path
from typing import Any

from gallery import ROOT, chromium, shoot
from page_blocks import blocks
from playwright.sync_api import FloatRect, Page, ViewportSize

import rootlace as rl

PAGE = ROOT / "docs" / "cache.md"
PICTURES = ROOT / "docs" / "screens" / "cache"
PICTURE = re.compile(r"screens/cache/((tree|run)-(\w+)\.png)")
TREE: ViewportSize = {"width": 1000, "height": 420}
ROWS = 66  # pixels of the tree's rows


def draw_tree(page: Page, runtime: rl.Runtime, path: Path) -> None:
    """Draw the tree of the server's page."""
    page.set_viewport_size(TREE)
    page.goto(runtime.url or "")
    page.click("#tab-tree")
    page.locator("#canvas").focus()
    page.wait_for_timeout(3_000)
    canvas = page.locator("#canvas").bounding_box()
    assert canvas is not None
    clip: FloatRect = {"x": 0, "y": canvas["y"] - 4, "width": TREE["width"], "height": ROWS}
    page.screenshot(path=path, clip=clip)


def draw_all(page: Page, runtime: rl.Runtime, folder: Path) -> None:
    text = PAGE.read_text("utf-8").splitlines()
    found = list(blocks(PAGE, "python"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for block, following in zip(found, [*found[1:], None], strict=True):
        block.run(names, runtime.url or "")
        behind = text[block.line : following.line if following else None]
        for name, kind, variable in PICTURE.findall("\n".join(behind)):
            if kind == "tree":
                draw_tree(page, runtime, PICTURES / name)
            else:
                names[variable].trace().save(folder / "run.html")
                shoot(page, folder / "run.html", PICTURES / name)


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    start = rl.Runtime
    with start(http_port=0, served_name="demo", warm_up=True) as runtime, chromium() as page:
        # The page's runtimes are this one.
        vars(rl)["Runtime"] = lambda: contextlib.nullcontext(runtime)
        with tempfile.TemporaryDirectory() as folder:
            draw_all(page, runtime, Path(folder))


if __name__ == "__main__":
    main()
