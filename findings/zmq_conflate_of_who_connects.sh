#!/usr/bin/env bash
# ZeroMQ 4.3.5 (pyzmq 27.3.0): CONFLATE on a reader (keep the last message alone) holds over `ipc` whoever binds. Over
# `inproc` the option of the socket that connects counts: a reader that binds and has it gets all messages, and a
# writer that connects and has it makes a reader without it lose all but the last.
#
# Guessed before: the reader's option counts, whatever is between. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check pyzmq==27.3.0

seen=$("$python" - "ipc://$folder/socket" <<'PYTHON'
import sys
import time

import zmq

context = zmq.Context()


def left(socket):
    found = []
    time.sleep(1)  # all that was sent has come
    while socket.poll(0):
        found.append(int(socket.recv()))
    return found


for address in ("inproc://here", sys.argv[1]):
    for who in ("reader", "writer"):
        for binds in ("reader", "writer"):
            writer, reader = context.socket(zmq.PUSH), context.socket(zmq.PULL)
            (reader if who == "reader" else writer).conflate = 1
            first, second = (reader, writer) if binds == "reader" else (writer, reader)
            first.bind(address)
            second.connect(address)
            time.sleep(1)  # a message before the connection would be conflated on its way
            for number in range(5):
                writer.send(b"%d" % number)
            print(f"{address.split(':')[0]}, the {binds} binds, the {who} conflates: {left(reader)}")
            writer.close(linger=0)
            reader.close()
            time.sleep(1)
context.destroy(linger=0)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
inproc, the reader binds, the reader conflates: [0, 1, 2, 3, 4]
inproc, the writer binds, the reader conflates: [4]
inproc, the reader binds, the writer conflates: [4]
inproc, the writer binds, the writer conflates: [0, 1, 2, 3, 4]
ipc, the reader binds, the reader conflates: [4]
ipc, the writer binds, the reader conflates: [4]
ipc, the reader binds, the writer conflates: [0, 1, 2, 3, 4]
ipc, the writer binds, the writer conflates: [0, 1, 2, 3, 4]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
