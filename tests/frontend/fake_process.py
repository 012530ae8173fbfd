"""Stands for `python -m rootlace.runtime.server`: reads its configuration, answers, obeys.

The model's name in the configuration chooses the behaviour.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.frontend.fake_server import FakeServer


def main() -> None:
    config = json.loads(sys.stdin.readline())
    behaviour = config["gateway"]["model"]
    print("loading", behaviour, file=sys.stderr, flush=True)
    if behaviour == "crash":
        raise SystemExit(3)
    if behaviour == "refuse":
        print(json.dumps({"error": "invalid_request", "message": "no model there"}), flush=True)
        raise SystemExit(1)
    if behaviour == "hang":
        sys.stdin.read()
        return
    with tempfile.TemporaryDirectory() as folder:
        server = FakeServer(Path(folder), api_key=config["gateway"].get("api_key", ""))
        Path(config["gateway"]["served_name"]).write_text(json.dumps(config))
        print("some library prints this")
        ready = {"program_address": server.address, "http_address": None, "pid": os.getpid()}
        print(json.dumps(ready), flush=True)
        if behaviour == "stubborn":
            import signal

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()
        sys.stdin.read()
        server.stop()


if __name__ == "__main__":
    main()
