#!/usr/bin/env bash
# llguidance 1.9.1 has Lark's library of terminals (`%import common.NAME`), and each has the language that it has in lark
# 1.3.1, but one: a line break may stand in `common.ESCAPED_STRING`. Grammars of JSON in Lark, as in lark's tutorial, have their strings
# of it, so a model may write a text in two lines between the quotes, which is no JSON; lark refuses it.
# All texts of up to three of twenty characters are compared, and a few longer ones.
#
# Guessed before: the same language for each name. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1 lark==1.3.1

seen=$("$python" -W ignore - <<'PYTHON'
from itertools import product

import lark
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from


class Bytes:
    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
NAMES = """DIGIT HEXDIGIT INT SIGNED_INT DECIMAL FLOAT SIGNED_FLOAT NUMBER SIGNED_NUMBER ESCAPED_STRING LCASE_LETTER
UCASE_LETTER LETTER WORD CNAME WS_INLINE WS CR LF NEWLINE SH_COMMENT CPP_COMMENT C_COMMENT SQL_COMMENT""".split()
CHARACTERS = "09aEe_+-.\"\\\n\r \t\f#/*é"
texts = ["".join(one) for length in range(1, 4) for one in product(CHARACTERS, repeat=length)]
texts += ['"a\nb"', '"\\""', '"\\\\"', '"a\\\n"', "1.5e+5", "//a\n", "/*a\n*/", "-- a"]
same = []
for name in NAMES:
    grammar = f"%import common.{name}\nstart: {name}\n"
    reader = lark.Lark(grammar, parser="lalr", lexer="basic")
    matcher = LLMatcher(tokenizer, grammar_from("lark", grammar))

    def accepts(text):
        matcher.reset()
        data = list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    def reads(text):
        try:
            reader.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    differ = [text for text in texts if reads(text) != accepts(text)]
    if differ:
        print(name, [(text, "lark" if reads(text) else "llguidance") for text in differ])
    else:
        same.append(name)
print(len(same), "of", len(NAMES), "are the same")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
ESCAPED_STRING [('"\n"', 'llguidance'), ('"a\nb"', 'llguidance')]
23 of 24 are the same
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
