#!/usr/bin/env bash
# interegular 0.3.3 calls an automaton disjoint from what it accepts once `reduce()` made it smaller: of
# `(ab)*c` and `abc`, `isdisjoint` is False before and True after. The intersection of the same two is not
# empty, and the reduced automaton accepts `abc`. The reduced one comes back to its first state, whose number is 0,
# and `isdisjoint` takes a state 0 for none. So two terminals of a grammar that collide do not, if they were reduced.
#
# Guessed before: a smaller automaton of the same language gives the same answer. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check interegular==0.3.3

seen=$("$python" -W ignore - <<'PYTHON'
import re

from interegular import parse_pattern

for pattern, text in (("(ab)*c", "abc"), ("a*b", "aab"), ("[0-9]+(,[0-9]+)*", "1,2"), ("ab+c", "abbc")):
    whole, other = parse_pattern(pattern).to_fsm(), parse_pattern(text).to_fsm()
    small = whole.reduce()
    print(
        *(pattern, text, bool(re.fullmatch(pattern, text)), small.accepts(text)),
        *("disjoint:", whole.isdisjoint(other), small.isdisjoint(other), (small & other).empty()),
    )
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
(ab)*c abc True True disjoint: False True False
a*b aab True True disjoint: False True False
[0-9]+(,[0-9]+)* 1,2 True True disjoint: False True False
ab+c abbc True True disjoint: False False False
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
