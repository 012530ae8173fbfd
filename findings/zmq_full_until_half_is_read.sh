#!/usr/bin/env bash
# ZeroMQ 4.3.5 (pyzmq 27.3.0): a socket that has reached its high-water mark takes nothing more until half of the
# places are read. With 10 places on each side of `inproc`, 20 messages fit; a reader may take 9 of them, and a send
# still raises `Again`; with the 10th, ten places open at once.
#
# Guessed before: one message read, one place free. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check pyzmq==27.3.0

seen=$("$python" - <<'PYTHON'
import zmq

context = zmq.Context()


def fill(socket):
    sent = 0
    while True:
        try:
            socket.send(b"x", zmq.NOBLOCK)
        except zmq.Again:
            return sent
        sent += 1


writer, reader = context.socket(zmq.PUSH), context.socket(zmq.PULL)
writer.sndhwm = reader.rcvhwm = 10
reader.bind("inproc://here")
writer.connect("inproc://here")
print("fit:", fill(writer))
free = []
for _ in range(10):
    reader.recv()
    writer.poll(1000, zmq.POLLOUT)
    free.append(fill(writer))
print("free after each message read:", free)
context.destroy(linger=0)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
fit: 20
free after each message read: [0, 0, 0, 0, 0, 0, 0, 0, 0, 10]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
