"""The SGLang paper's workloads (arXiv:2312.07104, figure 5), end to end, beside vLLM on a CPU.

    python -m benchmarks.programs --data DIR --vllm ENV/bin/python --json FILE --plot FILE.svg

Each program stands twice in its file (benchmarks/programs): as a program of the DSL, which runs on
a runtime with its cache and on one without, and as concurrent requests to vLLM's server with
OpenAI's interface. All engines have the same model loaded and take turns; caches are emptied
before. A batch at once gives programs per second, single programs one after the other the
latency. Repetitions have other rows; ratios are medians of those within a repetition.

Outputs of a random model mean nothing, so the work is made equal: both sides are asked for the
same prompts, token by token, and as many tokens greedily (`ignore_eos`); what was generated stays
in the prompts that follow. `optimal` is what an unlimited cache could have spared of our requests,
counted by a trie.

DIR has `prompts/` and `eval/`; without it texts of about the same lengths are made up.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.common import Report, console_of, new_parser, progress_bar
from benchmarks.programs.client import Encoder
from benchmarks.programs.engines import Engine, ours, vllm
from benchmarks.programs.measure import Turn, measure, warm_up
from benchmarks.programs.report import CACHE_OFF, ROOTLACE, found_of, table_of_found, targets_of
from benchmarks.programs.texts import made_up_texts, read_texts
from benchmarks.programs.vocabulary import with_vocabulary
from benchmarks.programs.workloads import WORKLOADS
from benchmarks.random_models import MODELS, make_model
from rootlace.kernels.native.machine import usable_cores

QUICK_SCALE = 0.25


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("programs", __doc__)
    option = parser.add_argument
    option("--plot", type=Path, metavar="FILE.svg", help="draw the ratios here")
    option("--data", type=Path, metavar="DIR", help="the data sets")
    option("--models", type=Path, metavar="DIR", default=MODELS, help="holds the model, or gets it")
    option("--size", choices=["a", "b"], help="~15M, ~150M parameters (default b; quick: a)")
    option("--vllm", type=Path, metavar="PYTHON", help="the interpreter of vLLM's environment")
    option("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    option("--repetitions", type=int, help="default 3, quick 1")
    option("--alone", type=int, default=1, help="programs that run one by one")
    option("--seconds", type=float, default=900, help="after which nothing is repeated")
    option("--scale", type=float, help="factor on the programs of a batch")
    option("--quick", action="store_true", help="few programs, once, size a")
    option("--threads", type=int, default=usable_cores(), help="of each engine")
    found = parser.parse_args(argv)
    found.size = found.size or ("a" if found.quick else "b")
    found.repetitions = found.repetitions or (1 if found.quick else 3)
    found.scale = found.scale or (QUICK_SCALE if found.quick else 1.0)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the peer, too
    console = console_of(110)
    texts = read_texts(arguments.data) if arguments.data else made_up_texts()
    made = make_model(arguments.size, arguments.models / arguments.size)
    workloads = [WORKLOADS[name] for name in arguments.workloads]
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="rootlace-programs-") as work, ExitStack() as stack:
        bar = stack.enter_context(progress_bar(console))
        task = bar.add_task("", total=None)

        def progress(what: str) -> None:
            bar.update(task, description=what, advance=1)
            if not console.is_terminal:  # output goes to a log
                print(what, flush=True)

        model = with_vocabulary(made, texts, made.with_name(f"{made.name}.words"))
        encoder = Encoder(model)
        engines: list[Engine] = []
        if arguments.vllm:
            log = Path(work) / "vllm.log"
            peer = vllm(arguments.vllm, model, arguments.threads, encoder, log)
            engines.append(stack.enter_context(peer))
        for name, cache in ((ROOTLACE, True), (CACHE_OFF, False)):
            engines.append(stack.enter_context(ours(name, model, arguments.threads, cache)))
        progress("all engines are loaded")
        warm_up(workloads, engines, texts, progress)
        report = Report("programs", arguments, "aiohttp")
        how_much = (arguments.repetitions, arguments.scale, arguments.alone, arguments.seconds)
        for turn in measure(workloads, engines, texts, encoder, *how_much):
            seconds = f"{turn.wall_s:.2f} s, alone {turn.latency_s:.2f} s"
            progress(f"{turn.workload}, {turn.engine}: {seconds}")
            turns.append(turn)
        foreign = report.foreign_line()  # while all our processes run, and count as ours
    found = found_of(turns)
    console.print(table_of_found(found))
    targets = targets_of(found)
    for what, target in targets.items():
        console.print(f"{what}: {target['value']} ({target['target']})", highlight=False)
    console.print(foreign)
    report.add("workloads", {one.name: one.describe for one in workloads})
    report.add("found", found)
    report.add("targets", targets)
    report.add("turns", turns)
    report.write()
    if arguments.plot:
        from benchmarks.programs.plot import plot_programs

        plot_programs(found, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
