"""Asks a server all that its OpenAPI document admits, and much that it does not: `make api-fuzz`.

    python scripts/api_fuzz.py [--seed N] [--examples N]

Starts a server with the embedded model and lets schemathesis make the requests, of all endpoints
but the one that pauses the engine. Fails on a reply of 5xx, of an undocumented status or type, or
one that does not fit its schema.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

import rootlace as rl
from rootlace.runtime.assets import demo_model

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the HTTP interface with schemathesis.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", type=int, default=15, help="random requests per endpoint")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as files,
        rl.Runtime(
            demo_model(), dtype="float32", device="cpu", http_port=0, files=files
        ) as runtime,
    ):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run"),
                *(f"{runtime.url}/openapi.json", "--url", str(runtime.url)),
                # Later requests would wait until the engine resumes.
                *("--exclude-path", "/pause_generation"),
                *("--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing"),
                *("--seed", str(given.seed), "--max-examples", str(given.examples)),
                *("--request-timeout", "60", "--no-color"),
            ]
        )
        with urllib.request.urlopen(f"{runtime.url}/server_info", timeout=60) as reply:
            answered = json.load(reply)["healthy"]
        with urllib.request.urlopen(f"{runtime.url}/metrics", timeout=60) as reply:
            _tell_answers(reply.read().decode())
    return done.returncode or int(not answered)


def _tell_answers(metrics: str) -> None:
    """Print how many requests to each path succeeded, and how many did not: few tell little."""
    counts: dict[str, list[int]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "rootlace_http_requests_total" and sample.labels["path"]:
                answers = counts.setdefault(sample.labels["path"], [0, 0])
                answers[not sample.labels["status"].startswith("2")] += int(sample.value)
    for path, (good, bad) in sorted(counts.items()):
        print(f"{path:32} {good:6} answered {bad:6} refused")


if __name__ == "__main__":
    sys.exit(main())
