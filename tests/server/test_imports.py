"""What the gateway may not import."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import rootlace.runtime.server.servers, rootlace.runtime.server.__main__
import rootlace.runtime.server.http.app
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_no_torch_in_the_gateway() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
