"""GBNF grammars keep their language: against sets of texts computed from the rules alone."""

import itertools
import random

import pytest
from tokenizers import Tokenizer, decoders, models

from rootlace.runtime.structured import GrammarCompiler, Matcher
from rootlace.runtime.structured.gbnf import Rules, parse_gbnf
from rootlace.runtime.structured.grammars import grammar_of, is_gbnf
from rootlace.runtime.structured.regex.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Reference,
    Regex,
    Repeat,
)
from rootlace.wire.errors import InvalidConstraint

LONGEST = 6


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """Every printable ASCII character is a token, and so are some pairs."""
    singles = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = ["<eos>", *singles, "ab", "aa", "ba", "bc", "ca", "abc", "12", "tr", '{"', '":']
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return GrammarCompiler(tokenizer, eos_token_ids=[0])


def accepts(compiler: GrammarCompiler, matcher: Matcher, text: str) -> bool:
    """Also tries every token on the way: a mask and `advance` say the same."""
    matcher.reset()
    for character in text:
        token = compiler.vocabulary.token_bytes.index(character.encode())
        allowed = matcher.allowed_mask()[token]
        assert matcher.advance(token) == allowed
        if not allowed:
            return False
    return matcher.is_accepting()


def texts(rules: Rules, name: str) -> set[str]:
    """All texts of a rule of at most LONGEST characters: the least fixed point of the rules."""
    known: dict[str, set[str]] = {rule: set() for rule in rules}

    def of(node: Regex) -> set[str]:
        if isinstance(node, Literal):
            return {node.text} if len(node.text) <= LONGEST else set()
        if isinstance(node, Chars):
            return {c for c in "abc" if any(a <= ord(c) <= b for a, b in node.ranges)}
        if isinstance(node, Reference):
            return known[node.name]
        if isinstance(node, Either):
            return set().union(*map(of, node.options))
        if isinstance(node, Concat):
            found = {""}
            for part in node.parts:
                found = joined(found, of(part))
            return found
        assert isinstance(node, Repeat)
        item, found, total = of(node.item), {""}, set()
        for count in range((LONGEST if node.most is None else node.most) + 1):
            if count >= node.least:
                total |= found
            found = joined(found, item)
        # With the empty text among the items, fewer are as good as more.
        return total | (found if node.most is None and node.least > LONGEST else set())

    while True:
        new = {rule: of(body) for rule, body in rules.items()}
        if new == known:
            return known[name]
        known = new


def joined(left: set[str], right: set[str]) -> set[str]:
    return {a + b for a in left for b in right if len(a) + len(b) <= LONGEST}


def every_text() -> list[str]:
    return [
        "".join(letters)
        for length in range(LONGEST)
        for letters in itertools.product("abc", repeat=length)
    ]


GRAMMARS = [
    'root ::= "a" root "b" | ""',
    'root ::= "a" root "bc" | "ab" root "c" | "b"',
    'root ::= [ab] root [ab] | "a" | "b" | ""',
    'root ::= x root y | "a"\nx ::= "a" | "ab"\ny ::= "bc" | "c"',
    'root ::= "a" ("b" root)?',
    'root ::= root "b" "c"? | "a"+',
    'root ::= x* "a"\nx ::= "ab" | "c" x x | ""',
    'root ::= "(" root ")" root | [abc]* | ""',
    'root ::= a{2,3} | b{0,1} root "c"\na ::= "a" | "b" a "c"\nb ::= [^b]',
    'root ::= . root . | "b" | "c"',
    "root ::= s s\ns ::= 'a' s | 'b' s 'b' |",
]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_the_language_is_that_of_the_rules(compiler: GrammarCompiler, grammar: str) -> None:
    language = texts(parse_gbnf(grammar), "root")
    matcher = compiler.compile(ebnf=grammar).matcher()
    for text in every_text():
        assert accepts(compiler, matcher, text) == (text in language), text


def random_grammar(rng: random.Random) -> str:
    names = ["root", "x", "y"]

    def item(depth: int) -> str:
        kind = rng.randrange(7 if depth else 4)
        if kind == 0:
            return rng.choice(["[ab]", "[^a]", "[b-c]"])
        if kind <= 2:
            return f'"{"".join(rng.choices("abc", k=rng.randint(1, 2)))}"'
        if kind == 3:
            return rng.choice(names)
        if kind == 4:
            return f"({body(depth - 1)})" + rng.choice(["?", "*", "+", "{1,2}", ""])
        return item(0) + rng.choice(["", "", "?", "*", "+"])

    def body(depth: int) -> str:
        options = rng.randint(1, 3)
        return " | ".join(
            " ".join(item(depth) for _ in range(rng.randint(1, 3))) for _ in range(options)
        )

    return "\n".join(f'{name} ::= {body(1)} | "{rng.choice("abc")}"' for name in names)


@pytest.mark.slow
def test_random_grammars_keep_their_language(compiler: GrammarCompiler) -> None:
    rng = random.Random(5)
    lark = 0
    for _ in range(40):
        grammar = random_grammar(rng)
        language = texts(parse_gbnf(grammar), "root")
        lark += isinstance(grammar_of(grammar), str)
        matcher = compiler.compile(ebnf=grammar).matcher()
        tried = [*rng.sample(sorted(language), min(len(language), 40))]
        tried += ["".join(rng.choices("abc", k=rng.randint(0, LONGEST))) for _ in range(60)]
        for text in tried:
            assert accepts(compiler, matcher, text) == (text in language), (grammar, text)
    assert lark > 10  # of both kinds, regular and not, there were many
    assert lark < 36


JSON = r"""
# as llama.cpp's example
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("{}", True),
        ('{"a": [1, -2.5e3, true, {"b":null}] }', True),
        ('{"a":"x\\u00e9\\n"}\n', True),
        ("[1]", False),
        ('{"a":01}', False),
        ('{"a":1,}', False),
        ('{"a" :1}', True),
        ('{"a"  :1}', False),
    ],
)
def test_json_of_llama_cpp(compiler: GrammarCompiler, text: str, valid: bool) -> None:
    assert accepts(compiler, compiler.compile(ebnf=JSON).matcher(), text) == valid


CHESS = r"""root ::= (
    # 1. e4 e5
    "1. " move " " move "\n"
    ([1-9] [0-9]? ". " move " " move "\n")+
)
move ::= (pawn | nonpawn | castle) [+#]?

# piece type, optional file/rank, optional capture, dest file & rank
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""

ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


def test_chess_and_arithmetic(compiler: GrammarCompiler) -> None:
    chess = compiler.compile(ebnf=CHESS).matcher()
    assert accepts(compiler, chess, "1. e4 e5\n2. Nf3 Nc6\n")
    assert accepts(compiler, chess, "1. O-O exd8=Q+\n12. Qaxb2# O-O-O\n")
    assert not accepts(compiler, chess, "1. e4 e9\n")
    assert isinstance(grammar_of(ARITHMETIC), str)
    arithmetic = compiler.compile(ebnf=ARITHMETIC).matcher()
    assert accepts(compiler, arithmetic, "(a1 +2)*3= 4\nx=y\n")
    assert not accepts(compiler, arithmetic, "(a1 +2*3= 4\n")


def test_escapes_and_comments() -> None:
    grammar = r"""root ::= "\x41\u00e9\U0001F600\"\n" # "not this"
      | [\]\-\\^a-] x-Y_1
    x-Y_1 ::= '"' [^]"""
    (escaped, other) = parse_gbnf(grammar)["root"].options  # type: ignore[union-attr]
    assert escaped == Literal('Aé\U0001f600"\n')
    assert other.parts[0] == Chars(  # type: ignore[union-attr]
        ((0x2D, 0x2D), (0x5C, 0x5E), (0x61, 0x61))
    )


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('root ::= "a"\nother = "b"', "line 2"),
        ('root ::= "a" missing', "line 1: there is no rule 'missing'"),
        ('root ::= "a"\n\n missing{0}', "line 3: there is no rule 'missing'"),
        ('root ::= "a" | [] missing', "there is no rule 'missing'"),
        ('root ::= "a"\nx ::= missing{0}', "line 2: there is no rule 'missing'"),
        ("root ::= {2}", "line 1: unexpected '{'$"),
        ("root ::= {" + "1" * 50_000 + "}", "line 1: unexpected '{'$"),
        ('root ::= "a" | {', "unexpected '{'$"),
        ('root ::= ("a" {)', r"expected a count like \{2\}"),
        ('root ::= "a"{' + " " * 50_000 + "3,2}", r"the count \{3,2\} allows nothing$"),
        ('root ::= x\n\nx ::= "a" |\n  (y', "line 4: this group is not closed"),
        ('top ::= "a"', "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule 'root' is defined twice"),
        ('root ::= "a\n"', "line 1: this text is not closed"),
        ("root ::= [a-", "line 1: this set of characters is not closed"),
        ("root ::= [a", "line 1: this set"),
        ("root ::= [b-a]", "reversed"),
        (r'root ::= "\q"', r"unknown escape \\q"),
        (r'root ::= "\ud800"', "no character"),
        ('root ::= "a"{3,2}', "allows nothing"),
        ('root ::= "a"{1,9999999}', "bounded"),
        ('root ::= "a" <tok>', "unexpected '<'"),
        ("root ::= " + "(" * 200, "nested"),
        ('root ::= "a" root', "no text"),
        ("start: missing", "missing"),
        ('start: "a\n', "line 1"),
    ],
)
def test_errors_name_the_line(compiler: GrammarCompiler, grammar: str, said: str) -> None:
    with pytest.raises(InvalidConstraint, match=said) as caught:
        compiler.compile(ebnf=grammar)
    assert str(caught.value).startswith("ebnf: ")


def test_the_notation_is_recognised() -> None:
    assert is_gbnf('# x\n  root ::= "a"')
    assert is_gbnf('root\n::= "a"')
    assert not is_gbnf('start: "a::=b"')
    assert is_gbnf("\r\n\t\f root\t::=") and is_gbnf("#" + "\n" * 200_000 + " root ::= x")


def test_lark_is_taken_as_it_is(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(ebnf='start: "a" item ("," item)*\nitem: /[0-9]+/').matcher()
    assert accepts(compiler, matcher, "a1,22,3")
    assert not accepts(compiler, matcher, "a1,,3")


def test_a_long_chain_of_rules_and_a_large_one(compiler: GrammarCompiler) -> None:
    chain = "\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(300)) + '\nr300 ::= "b"'
    matcher = compiler.compile(ebnf=f"root ::= r0\n{chain}").matcher()
    assert accepts(compiler, matcher, "b" + "a" * 300)
    doubling = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(30)) + '\nr30 ::= "b"'
    with_many = compiler.compile(ebnf=f"root ::= r27\n{doubling}").matcher()
    assert accepts(compiler, with_many, "b" * 8)
    assert not compiler.compile(ebnf=f"root ::= r0\n{doubling}").matcher().is_accepting()


def test_blanks_are_read_in_linear_time() -> None:
    """In quadratic time this test would not end."""
    blanks = " " * 16_000
    assert not is_gbnf("\n" * 1_000_000)
    with pytest.raises(InvalidConstraint, match="expected a count"):
        parse_gbnf('root ::= "a"{' + blanks + "," + blanks)
