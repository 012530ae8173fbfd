"""An engine process without a model: counts upwards from the last token, dies when told.

Its start takes as long as the file `hold` in the folder given as the first argument exists. The
token `DEADLY` kills it when it is submitted or sampled, in one step with all that is running unless
the request is suspected; `SUDDEN` kills it as it is taken in, outside of any step; `ENDLESS`
requests are never finished. What is to be pinned is, unless there is a file `full`; requests for no
token wait as long as there is one named `busy`.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import zmq

from rootlace.runtime import processes
from rootlace.runtime.contracts.messages import (
    STEPS,
    Abort,
    EngineOutput,
    EngineRequest,
    Flush,
    Flushed,
    ForgetNamespace,
    GetPins,
    GetStats,
    Heartbeat,
    Pinned,
    PinnedPrefix,
    Ready,
    Stats,
    Stop,
    Unpin,
    Unpinned,
    decode_to_engine,
    encode,
)
from rootlace.runtime.engine.client.process_config import EngineProcessConfig
from rootlace.runtime.engine.core import step_record, write_down
from rootlace.wire.protocol import RequestFacts
from rootlace.wire.sampling import PIN_SECONDS

DEADLY = 13
SUDDEN = 14
ENDLESS = 1000


def main(folder: Path) -> None:
    config = processes.read_config(sys.stdin.buffer, EngineProcessConfig)
    processes.call_when_parent_ends(sys.stdin.buffer, lambda: os._exit(0))
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(config.inbox)
    outbox.connect(config.outbox)
    while (folder / "hold").exists():
        time.sleep(0.01)
    ready = Ready(os.getpid(), 8, 16, 128, 128, 2000, "none", "float32")
    outbox.send(encode([ready]))
    record = step_record(Path(config.record), 8)
    running: set[int] = set()
    pins: dict[str, PinnedPrefix] = {}
    turns = flushed = forgotten = 0
    while True:
        turns += 1
        outbox.send(encode([Heartbeat(turns)]))
        if not inbox.poll(100):
            continue
        for message in decode_to_engine(inbox.recv()):
            if isinstance(message, Stop):
                return
            if isinstance(message, EngineRequest):
                if message.rid in running:
                    raise SystemExit(f"request id {message.rid} is in use")
                last = [*message.token_ids.tolist(), *message.output_ids.tolist()][-1]
                if last == SUDDEN:
                    write_down(record[STEPS], (message.rid,), 1)
                    os._exit(9)
                if last == DEADLY:
                    company = () if message.suspected else running
                    write_down(record[0], np.array([message.rid, *company]), np.ones(1))
                    context.destroy(linger=1000)  # what was told before has arrived
                    os._exit(9)
                while message.params.max_tokens == 0 and (folder / "busy").exists():
                    time.sleep(0.01)
                running.add(message.rid)
                pin = ""
                if message.handling.cache.pin and not (folder / "full").exists():
                    pin, ttl = f"pin {last}", message.handling.cache.ttl or PIN_SECONDS
                    of = message.namespace, message.adapter, len(message.token_ids)
                    pins[pin] = PinnedPrefix(pin, *of, message.params.max_tokens or 0, ttl)
                finish = None if last >= ENDLESS else "length"
                outbox.send(
                    encode(
                        [
                            EngineOutput(
                                message.rid, (last + 1,), finish=finish, facts=RequestFacts(pin=pin)
                            )
                        ]
                    )
                )
                if finish:
                    running.discard(message.rid)
            elif isinstance(message, Abort):
                for rid in set(message.rids) & running:
                    running.discard(rid)
                    outbox.send(encode([EngineOutput(rid, finish="abort")]))
            elif isinstance(message, GetStats):
                found = {"running": len(running), "flushed": flushed, "forgotten": forgotten}
                outbox.send(encode([Stats(message.ticket, found)]))
            elif isinstance(message, GetPins):
                outbox.send(encode([Pinned(message.ticket, tuple(pins.values()))]))
            elif isinstance(message, Unpin):
                outbox.send(
                    encode([Unpinned(message.ticket, pins.pop(message.pin, None) is not None)])
                )
            elif isinstance(message, Flush):
                flushed += 1
                outbox.send(encode([Flushed(message.ticket)]))
            elif isinstance(message, ForgetNamespace):
                forgotten += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
