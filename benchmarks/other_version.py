"""Whole requests and programs beside another version: `python -m benchmarks.other_version PYTHON`.

`PYTHON` is the interpreter of an environment with the other version of Rootlace. Both versions
serve the embedded model on the CPU at the same time, and are asked in turns: chats of one token,
one at a time, and batches of programs of three `gen` of four tokens each. Both prompts are warm, so
what is measured is mostly the host's part.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.common import Report, aim, console_of, new_parser, progress_bar, table_of

WORKER = """
import http.client, json, sys, time
from urllib.parse import urlsplit
import rootlace as rl

@rl.function
def three(s, number):
    s += f"Question {number % 16}:"
    for name in ("first", "second", "third"):
        s += rl.gen(name, max_tokens=4, temperature=0, ignore_eos=True) + ";"

def chats(count):
    for _ in range(count):
        connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": TYPE})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        reply.read()

def programs(count):
    states = three.run_batch([{"number": number} for number in range(count)], backend=runtime)
    assert all(state["third"] for state in states)

TYPE = "application/json"
MESSAGES = [{"role": "user", "content": "Hello!"}]
BODY = json.dumps({"messages": MESSAGES, "max_tokens": 1, "temperature": 0})
with rl.Runtime(device="cpu", http_port=0) as runtime:
    connection = http.client.HTTPConnection(urlsplit(runtime.url).netloc)
    print("ready", flush=True)
    for line in sys.stdin:
        load, count = line.split()
        began = time.perf_counter()
        {"chats": chats, "programs": programs}[load](int(count))
        print(time.perf_counter() - began, flush=True)
"""
LOADS = {"chats": 200, "programs": 128}
"""How many requests or programs are measured at once."""


class Version:
    """A process that serves one version, and runs loads on its server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, load: str, count: int) -> float:
        """Seconds that `count` items of the load take. Raises EOFError if the process ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{load} {count}\n")
        self._process.stdin.flush()
        return float(self.line())

    def line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise EOFError("the process of a version ended: its error is above")
        return line


@contextmanager
def serving(python: str) -> Iterator[Version]:
    command = [python, "-c", WORKER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        version = Version(process)
        version.line()
        yield version
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    parser = new_parser("other_version", __doc__)
    parser.add_argument("other", metavar="PYTHON", help="of the other version's environment")
    parser.add_argument("--rounds", type=int, default=9, help="the median of so many counts")
    args = parser.parse_args()
    console, report = console_of(110), Report("other_version", args)
    with ExitStack() as stack:
        names = {"this": sys.executable, "other": args.other}
        versions = {name: stack.enter_context(serving(python)) for name, python in names.items()}
        rates: dict[str, dict[str, list[float]]] = {
            load: {name: [] for name in versions} for load in LOADS
        }
        with progress_bar(console) as bar:
            task = bar.add_task("rounds", total=args.rounds + 1)
            for at in range(args.rounds + 1):
                for load, count in LOADS.items():
                    for name in versions if at % 2 else reversed(versions):
                        rate = count / versions[name].run(load, count)
                        if at:  # the first round warms both up
                            rates[load][name].append(rate)
                bar.advance(task)
    rows = {}
    for load, by_version in rates.items():
        ratios = [a / b for a, b in zip(by_version["this"], by_version["other"], strict=True)]
        rows[f"{load} per second"] = {
            **{name: statistics.median(values) for name, values in by_version.items()},
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    columns = {"this": "{this:,.0f}", "other": "{other:,.0f}"}
    columns |= {name: f"{{{name}:.2f}}" for name in ("ratio", "least", "most")}
    console.print(table_of("Both versions in turns, medians", rows, columns))
    report.add("rates", rows)
    report.add("targets", {name: aim(row["ratio"], ">=", 1.5) for name, row in rows.items()})
    console.print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
