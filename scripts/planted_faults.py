"""Checks that the simulation finds faults, which are put into the product one at a time.

    python scripts/planted_faults.py [--seeds 400] [--only NAME] [--json FILE]

Each fault replaces a few words, found by their exact text, in a copy of the checkout; the run ends
if the text is missing. Worlds then run from seed 0 on until one fails, at most `--seeds`. Without a
fault none may fail, which is checked first. Exit status 1 if more than one fault is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutants import copy_of_the_checkout

SOUND_SEEDS = 20


@dataclass(frozen=True)
class Fault:
    """A fault: its description, its file, and the change from `old` to `new`."""

    name: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Outcome:
    """`seed`: the first world that failed; -1 if none did. `said`: its failure."""

    name: str
    seed: int
    operations: int
    seconds: float
    said: str


RESTARTS = "runtime/engine/client/restarts.py"
ENGINE_CLIENT = "runtime/engine/client/engine_client.py"
PULSE = "runtime/engine/client/engine_client.py"
SESSION = "runtime/server/session.py"
BRANCH = "runtime/server/branch.py"
GENERATE = "runtime/server/generate.py"
SEQUENCE = "runtime/server/sequence.py"
SERVER = "runtime/server/programs.py"
SESSION_LOG = "runtime/server/session_log.py"
KEPT = "runtime/server/session_store.py"
SCHEDULER = "runtime/scheduler/scheduler.py"

FAULTS = (
    Fault(
        "replay begins anew, and its tokens are sent twice",
        RESTARTS,
        "request, output_ids=output_ids, suspected",
        "request, suspected",
    ),
    Fault(
        "replay omits the last token",
        RESTARTS,
        "np.array(self.output_ids, np.int32)",
        "np.array(self.output_ids[:-1], np.int32)",
    ),
    Fault(
        "replay has another seed",
        RESTARTS,
        "resumed=self.engines > 0\n",
        "resumed=self.engines > 0,\n            params=msgspec.structs.replace("
        "request.params, seed=(request.params.seed or 0) + 1),\n",
    ),
    Fault(
        "a constraint misses the last token before the replay",
        "runtime/engine/core.py",
        "if not self._matcher.advance(token):",
        "if self._taken + 1 < len(self.request.output_ids) and not self._matcher.advance(token):",
    ),
    Fault(
        "the next engine gets no requests",
        ENGINE_CLIENT,
        "for request in self._restarts.resume():\n            self.send(request)",
        "for _ in self._restarts.resume():\n            pass",
    ),
    Fault(
        "messages that arrive without an engine are lost",
        ENGINE_CLIENT,
        "        self._restarts.add(request, on_update, self._up, stays)\n",
        "        if self._up:\n"
        "            self._restarts.add(request, on_update, self._up, stays)\n",
    ),
    Fault(
        "a silent engine is never given up",
        PULSE,
        "if silent >= silence:",
        "if silent >= 1e9:",
    ),
    Fault(
        "a heartbeat counts as a turn of the loop",
        PULSE,
        "if message.turns == self._turns:",
        "if message.turns == -1:",
    ),
    Fault(
        "a request that kills engines is retried forever",
        RESTARTS,
        "(1 if len(in_step or ()) == 1 else 2)",
        "99",
    ),
    Fault(
        "a request of a failed step is not computed alone",
        "runtime/scheduler/output.py",
        "            self.add(sequence, min(sequence.computed, sequence.length))\n",
        "",
    ),
    Fault(
        "an aborted request keeps its blocks",
        SCHEDULER,
        "            self._running.remove(sequence)\n        update = output",
        "            self._running.forget(sequence)\n        update = output",
    ),
    Fault(
        "a released branch is still counted",
        SEQUENCE,
        "        model.branch_count -= 1\n        model.branches_of",
        "        model.branches_of",
    ),
    Fault(
        "a terminal event is sent twice if an operation fails",
        BRANCH,
        "                self._emit(event)\n        self._working = False",
        "                self._emit(event)\n"
        "                if isinstance(event, Failed):\n                    self._emit(event)\n"
        "        self._working = False",
    ),
    Fault(
        "a terminal event is lost if another came in the same turn",
        SESSION,
        "        self._events.append(event)\n\n    def _deliver",
        "        if len(self._events) < 4:\n            self._events.append(event)\n\n"
        "    def _deliver",
    ),
    Fault(
        "a cancelled branch continues",
        BRANCH,
        "        self._break(error)\n        if self._waiting is not None",
        "        if self._waiting is not None",
    ),
    Fault(
        "a fork shares its parent's tokens",
        SEQUENCE,
        "SequenceState(self.ids[:], self.pending",
        "SequenceState(self.ids, self.pending",
    ),
    Fault(
        "a stop token stays in the branch",
        GENERATE,
        '            return self.token_ids[:-1], ""',
        '            return self.token_ids, ""',
    ),
    Fault(
        "the last token before a stop string leaves the branch",
        GENERATE,
        "0 <= self._ends[count - 1] <= cut:",
        "0 <= self._ends[count - 1] < cut:",
    ),
    Fault(
        "a pin is released when its prompt is complete",
        "runtime/cache/retention.py",
        "        self._pins[name] = Pin(name, namespace, node.end, node, until, holder)\n",
        "        self._pins[name] = Pin(name, namespace, node.end, node, until - seconds, holder)\n"
        "        until -= seconds\n",
    ),
    Fault(
        "a copy of a block lacks its last row",
        "runtime/scheduler/kv_manager.py",
        "builder.share_rows(int(node.blocks[-1]), int(blocks[0]), inside)",
        "builder.share_rows(int(node.blocks[-1]), int(blocks[0]), inside - 1)",
    ),
    Fault(
        "frames overtake those that wait for a slow client",
        SERVER,
        "if not connection.backlog and self._try(connection, frame):",
        "if self._try(connection, frame):",
    ),
    Fault(
        "the session of a disconnected client stays open",
        SERVER,
        "        connection.waiting.clear()\n        connection.session.close()",
        "        connection.waiting.clear()",
    ),
    Fault(
        "a lost connection does not fail waiting operations",
        "frontend/client/connection.py",
        "        for op in list(self._sinks):\n            _fail(self._sinks, op, self._lost)\n",
        "",
    ),
    Fault(
        "the rest of a frame after a time slice is dropped",
        SERVER,
        "                asyncio.get_running_loop().call_soon(self._work, connection)\n",
        "                waiting.clear()\n",
    ),
    Fault(
        "a timeout counts but is never checked",
        BRANCH,
        "        if self._waiting is not None and not self._waiting.done():\n"
        "            self._waiting.set_exception(self._overdue)",
        "        pass",
    ),
    Fault(
        "state: clients get answers that are not written yet",
        SESSION,
        "                self.log.flush()\n            self._on_events",
        "                pass\n            self._on_events",
    ),
    Fault(
        "state: a stream begins anew",
        SESSION_LOG,
        "GenerationLog(before, self._chunks.pop(op, {}),",
        "GenerationLog(before, {},",
    ),
    Fault(
        "state: missing events of an ended operation are not sent",
        SESSION,
        "(ended := self.log.answers(op))",
        "(ended := self.log.answers(op)[:-1])",
    ),
    Fault(
        "state: a fork has its parent's later tokens",
        KEPT,
        "branch.segments = above.segments[:]",
        "branch.segments = above.segments",
    ),
    Fault(
        "state: text that is not tokenized yet is lost",
        SESSION_LOG,
        "yield saved, SequenceState(ids, saved.pending,",
        "yield saved, SequenceState(ids, (),",
    ),
    Fault(
        "namespaces share one tree",
        "runtime/contracts/messages.py",
        "    return (adapter, namespace) if adapter else namespace\n",
        '    return (adapter, "") if adapter else ""\n',
    ),
    Fault(
        "every timeout is refused where others run",
        "runtime/scheduler/queue.py",
        "heap[0][0] < now + seconds(heap[0][2])):",
        "True):",
    ),
    Fault(
        "pins are not set again after a death",
        ENGINE_CLIENT,
        "self.send(request)\n        self._pinned.pin_again(self.next_rid, self.submit)",
        "self.send(request)",
    ),
    Fault(
        "what another engine hands over is not checked",
        "runtime/offload/slot_store.py",
        "        if checksum(key, into) != offered:\n",
        "        if False:\n",
    ),
)


def put(fault: Fault, root: Path) -> str:
    """Put the fault into the checkout `root`; return the file's former text. Raises SystemExit if
    `old` is not there exactly once."""
    path = root / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: {text.count(fault.old)} places in {fault.file}, not 1")
    path.write_text(text.replace(fault.old, fault.new))
    return text


def worlds(root: Path, seeds: int, jobs: int) -> tuple[int, str]:
    """Run worlds from seed 0 on; return the first that fails and its failure, or -1."""
    environment = {**os.environ, "PYTHONPATH": str(root / "build" / "tree"), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.deterministic", "--first", "--no-shrink"]
    command += ["--seeds", f"0:{seeds}", "--jobs", str(jobs)]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True)
    if done.returncode == 0:
        return -1, done.stdout.splitlines()[-1]
    found = re.search(r"^seed (\d+): (.*)", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(f"the simulation itself failed:\n{done.stdout}{done.stderr}")
    return int(found[1]), f"{found[2]}\n{done.stdout.splitlines()[-1]}"


def judge(fault: Fault, root: Path, seeds: int, jobs: int) -> Outcome:
    before = put(fault, root)
    try:
        seed, said = worlds(root, seeds, jobs)
    finally:
        (root / fault.file).write_text(before)
    figures = re.search(r"([\d,]+) operations, .* in ([\d.]+) s", said)
    operations, seconds = (figures[1], figures[2]) if figures else ("0", "0")
    return Outcome(fault.name, seed, int(operations.replace(",", "")), float(seconds), said[:300])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", help="faults whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    wanted = [fault for fault in FAULTS if not options.only or options.only in fault.name]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="rootlace-faults-") as folder:
        root = Path(folder) / "checkout"
        copy_of_the_checkout(root)
        seed, said = worlds(root, SOUND_SEEDS, options.jobs)
        if seed >= 0:
            print(f"a world fails without any fault: {said}", file=sys.stderr)
            return 1
        for fault in wanted:
            outcome = judge(fault, root, options.seeds, options.jobs)
            outcomes.append(outcome)
            where = "NOT FOUND" if outcome.seed < 0 else f"seed {outcome.seed}"
            print(f"{where:10} {outcome.operations:>9,} operations  {fault.name}", flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    found = sum(outcome.seed >= 0 for outcome in outcomes)
    print(f"{found} of {len(outcomes)} faults found")
    return 0 if found >= len(outcomes) - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
