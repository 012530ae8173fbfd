"""Modules that the gateway may not import, and modules imported only during longer waits."""

import subprocess
import sys

import pytest

CODE = """
import sys
import rootlace.runtime.server.programs, rootlace.runtime.server.__main__
import rootlace.runtime.server.http.model_routes
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_no_torch_in_the_server() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # The engine is started first; modules for texts and answers are imported meanwhile.
        ("rootlace.runtime.server.app", "tokenizers llguidance aiohttp jinja2 prometheus_client"),
        # Many gateways never get a constraint, and an engine compiles it.
        (
            "rootlace.runtime.server.http.model_routes",
            "jsonschema llguidance outlines_core interegular",
        ),
        # Options and a model's configuration are checked first.
        ("rootlace.runtime.engine.__main__", "torch transformers"),
        # Commands that ask a server need no model code.
        ("rootlace.cli.running", "numpy aiohttp rootlace.runtime.model.checkpoint.config"),
    ],
)
def test_what_is_heavy_is_imported_while_something_else_is_done(module: str, heavy: str) -> None:
    code = f"import sys, {module}; print([n for n in {heavy.split()} if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
