#!/usr/bin/env bash
# math-verify 0.9.0, which scores answers in mathematics (lm-eval's Minerva tasks) and is a reward in training, reads other
# numbers than an answer says: `1.2e5` is 1.2 in a sentence, and between dollar signs `1.2e1` is 1.2 times Euler's number; `3 1/2`
# is 1 or 2 (`3\frac{1}{2}` is right); "is - 5." is 5. So right answers count as wrong, and `$3 1/2$` as right where 2 is.
# Numbers are compared at six decimals: 0.0000001 is 0.0000002, and is not 0.
#
# Guessed before: numbers as Python's float() reads them, mixed numbers as a sum. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2 sympy==1.14.0

seen=$("$python" -W ignore - 2>"$folder/log" <<'PYTHON'
from math_verify import parse, verify

for right, answer in (
    ("$120000$", "The answer is 120000."),
    ("$120000$", "The answer is 1.2e5."),
    ("$12$", "$1.2e1$"),
    ("$120000$", r"$1.2\times10^5$"),
    ("$3.5$", r"$3\frac{1}{2}$"),
    ("$3.5$", "$3 1/2$"),
    ("$2$", "$3 1/2$"),
    ("$3.5$", "The answer is 3 1/2."),
    ("$-5$", "The answer is -5."),
    ("$-5$", "The answer is - 5."),
    ("$0.0000001$", "$0.0000002$"),
    ("$0.0000001$", "$0$"),
):
    found = parse(answer)
    print(right, "answered", answer, "read", found[0], "right", verify(parse(right), found))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
$120000$ answered The answer is 120000. read 120000 right True
$120000$ answered The answer is 1.2e5. read 1.20000000000000 right False
$12$ answered $1.2e1$ read 1.2*E*1 right False
$120000$ answered $1.2\times10^5$ read 1.2*10**5 right True
$3.5$ answered $3\frac{1}{2}$ read 7/2 right True
$3.5$ answered $3 1/2$ read 2 right False
$2$ answered $3 1/2$ read 2 right True
$3.5$ answered The answer is 3 1/2. read 1 right False
$-5$ answered The answer is -5. read -5 right True
$-5$ answered The answer is - 5. read 5 right False
$0.0000001$ answered $0.0000002$ read 2.00000000000000e-7 right True
$0.0000001$ answered $0$ read 0 right False
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
