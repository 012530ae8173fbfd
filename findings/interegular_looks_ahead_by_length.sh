#!/usr/bin/env bash
# interegular 0.3.3 wants a text to be as long as what a negative look-ahead looks for: `(?!admin)[a-z]+` accepts
# neither `root` nor `bob`, which `re` matches, but `alexander`. What a positive look-ahead sees may in turn lie
# behind the whole pattern: `(?=\w{2})\w`, which matches nothing, accepts `ab`. lm-format-enforcer 0.11.3 writes
# texts by these automata: by `(?!admin)[a-z]+` it goes on behind `root` until there are five letters.
#
# Guessed before: a look-ahead that fails for want of text is a negative one that holds. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check interegular==0.3.3 lm-format-enforcer==0.11.3

seen=$("$python" -W ignore - <<'PYTHON'
import logging
import re

logging.disable()
from interegular import parse_pattern
from lmformatenforcer import RegexParser

for pattern, *texts in (
    (r"(?!admin)[a-z]+", "bob", "root", "admin", "alexander"),
    (r"(?!00)\d{1,4}", "7", "12", "00"),
    (r"(?!.*--)[a-z-]+", "a", "a-b", "a--b"),
    (r"(?=\w{2})\w", "a", "ab"),
):
    automaton = parse_pattern(pattern).to_fsm()
    for text in texts:
        parser = RegexParser(pattern)
        for letter in text:
            allowed = letter in parser.get_allowed_characters()
            if not allowed:
                break
            parser = parser.add_character(letter)
        print(
            *(pattern, text, "re:", bool(re.fullmatch(pattern, text))),
            *("interegular:", automaton.accepts(text), "enforcer:", allowed and parser.can_end()),
        )
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
(?!admin)[a-z]+ bob re: True interegular: False enforcer: False
(?!admin)[a-z]+ root re: True interegular: False enforcer: False
(?!admin)[a-z]+ admin re: False interegular: False enforcer: False
(?!admin)[a-z]+ alexander re: True interegular: True enforcer: True
(?!00)\d{1,4} 7 re: True interegular: False enforcer: False
(?!00)\d{1,4} 12 re: True interegular: True enforcer: True
(?!00)\d{1,4} 00 re: False interegular: False enforcer: False
(?!.*--)[a-z-]+ a re: True interegular: False enforcer: False
(?!.*--)[a-z-]+ a-b re: True interegular: True enforcer: True
(?!.*--)[a-z-]+ a--b re: False interegular: False enforcer: False
(?=\w{2})\w a re: False interegular: False enforcer: False
(?=\w{2})\w ab re: False interegular: True enforcer: True
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
