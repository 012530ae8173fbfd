"""llama.cpp's server as built in the package xllamacpp, with the options of `llama-server`."""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-np", dest="slots", type=int, default=1)
    parser.add_argument("-c", dest="context", type=int, default=0)
    parser.add_argument("--kv-unified", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("-t", dest="threads", type=int, required=True)
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.hostnames = ["127.0.0.1"]
    params.port = given.port
    params.n_parallel, params.n_ctx = given.slots, given.context
    params.kv_unified = given.kv_unified
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
