#!/usr/bin/env bash
# llama.cpp (in the sources of llama-cpp-python 0.3.36) writes grammars of JSON schemas that accept what is no JSON.
# Where a `pattern` has `.` or a negated set, the string may hold a quote or a backslash as it stands: by
# `^.*$` a model ended the string and wrote on until its tokens were used up. An integer with a negative `maximum` may be
# `-012`. And a pattern with `\d`, `\w` or `\S` is dropped as a whole, without a word: `^\d{3}$` is any string, while
# `^[0-9]{3}$` is held. Its README says that unsupported features are skipped, and of patterns that they need `^` and `$`.
#
# Guessed before: a string stays a string, and a digit is one of the ten. Found 2026-11-30; its server answers so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
  --no-binary llama_cpp_python --dest "$folder" llama_cpp_python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder"
cd "$folder"/llama_cpp_python-0.3.36/vendor/llama.cpp

# The converter alone; the first four functions stand for those of files that need the whole library.
cat > "$folder/convert.cpp" <<'CPP'
#include <cstdlib>
#include <iostream>

#include "json-schema-to-grammar.h"

std::string string_repeat(const std::string& text, size_t times) {
  std::string all;
  while (times--) all += text;
  return all;
}
std::string string_join(const std::vector<std::string>& texts, const std::string& between) {
  std::string all;
  for (size_t i = 0; i < texts.size(); i++) all += (i ? between : "") + texts[i];
  return all;
}
std::vector<std::string> string_split(const std::string& text, const std::string& at) {
  std::vector<std::string> parts;
  size_t from = 0;
  for (size_t to; (to = text.find(at, from)) != std::string::npos; from = to + at.size())
    parts.push_back(text.substr(from, to - from));
  parts.push_back(text.substr(from));
  return parts;
}
extern "C" void ggml_abort(const char*, int, const char*, ...) { std::abort(); }

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream rules(json_schema_to_grammar(common_json::parse(line), true));
    std::cout << line << "\n";
    for (std::string rule; std::getline(rules, rule);)
      if (!rule.rfind("root ", 0) || !rule.rfind("dot ", 0)) std::cout << "  " << rule << "\n";
  }
}
CPP
"${CXX:-g++}" -std=c++17 -O0 -w -I common -I vendor -I include -I ggml/include -include sstream -o "$folder/convert" \
  "$folder/convert.cpp" common/json-schema-to-grammar.cpp common/json-schema.cpp common/json.cpp common/trie.cpp \
  common/unicode.cpp

seen=$("$folder/convert" <<'TEXT'
{"type":"string","pattern":"^.*$"}
{"type":"string","pattern":"^[^,]+$"}
{"type":"integer","maximum":-1}
{"type":"string","pattern":"^[0-9]{3}$"}
{"type":"string","pattern":"^\\d{3}$"}
{"type":"string","pattern":"^\\w+$"}
TEXT
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"type":"string","pattern":"^.*$"}
  dot ::= [^\x0A\x0D]
  root ::= "\"" (dot*) "\""
{"type":"string","pattern":"^[^,]+$"}
  root ::= "\"" ([^,]+) "\""
{"type":"integer","maximum":-1}
  root ::= ("-" ([0] [0-9]{1,15} | [1-9] [0-9]{0,15}))
{"type":"string","pattern":"^[0-9]{3}$"}
  root ::= "\"" (root-1{3,3}) "\""
{"type":"string","pattern":"^\\d{3}$"}
  root ::= string
{"type":"string","pattern":"^\\w+$"}
  root ::= string
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
