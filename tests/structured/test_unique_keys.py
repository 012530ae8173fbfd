"""No object has a key twice, where any key may come, too."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.gbnf import names_tokens
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema, has_open_keys
from rootlace.runtime.structured.llguidance_backend import LLGuidanceGrammar
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from tests.structured.canonical_tokens import encode
from tests.structured.random_model import RandomModel, accepts, byte_vocabulary

N = {"type": "integer"}
OPEN: list[Any] = [
    {"type": "object"},
    {},
    {"type": "object", "additionalProperties": N},
    {"type": "object", "properties": {"a": N, "b": N}, "required": ["a"]},
    {"type": "object", "patternProperties": {"^[a-c]": N}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "minProperties": 1},
    {"type": "array"},
    {"type": "array", "items": {"type": "object"}, "minItems": 1},
    {"type": "object", "properties": {"a": {"type": "object"}}, "additionalProperties": False},
]
CLOSED: list[Any] = [
    {"type": "object", "properties": {"a": N}, "additionalProperties": False},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [N], "maxItems": 1},
    {"type": "string", "maxLength": 100_000},
]
TWICE = [
    '{"x":1,"x":2}',
    '{"x":1,"y":2,"x":3}',
    '{"a":1,"\\u0061":2}',
    '{"x":1,"\\u0078":2}',
    '{"é":1,"é":2}',
    '{"q\\"":1,"q\\"":2}',
    '{"":1,"":2}',
    '{"x":{"y":1,"y":2}}',
    '[{"x":1},{"x":1,"x":1}]',
]
ONCE = [
    '{"x":1,"xx":2,"xxx":3}',
    '{"xx":1,"x":2}',
    '{"x":{"x":{"x":1}},"y":{"x":1}}',
    '[{"x":1},{"x":1}]',
    '{"x":"x","y":"\\"x\\":1,\\"x\\":2"}',
]


@pytest.fixture(scope="module", params=["auto", "llguidance"])
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), config=ConstraintConfig(backend=request.param))


@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
def test_a_key_that_is_there_is_not_written_again(
    compiler: GrammarCompiler, whitespace: str
) -> None:
    grammar = compiler.compile(json_schema={}, whitespace=whitespace)
    for text in TWICE:
        assert not accepts(grammar, compiler.vocabulary, text.encode()), text
    for text in ONCE:
        assert accepts(grammar, compiler.vocabulary, text.encode()), text


def _tag(**more: Any) -> str:
    form = {"type": "tag", "content": {"type": "json_schema", "json_schema": {}}, **more}
    return json.dumps({"format": form})


ROUTES: list[tuple[dict[str, str], str, str]] = [
    (
        {"structural_tag": json.dumps({
            "structures": [
                {"begin": "<f=a>", "schema": {}, "end": "</f>"},
                {"begin": "<f=a> ", "schema": {}, "end": "</f>"},
                {"begin": "<f=b>", "schema": {"type": "object"}, "end": "</f>"},
            ],
            "triggers": ["<f="],
        })},
        'say {"x":1,"x":2} <f=a>[1]</f> and <f=a>',
        '</f> or {"x":1,"x":2}',
    ),
    ({"structural_tag": _tag(begin="[", end="]")}, "[", "]"),
    ({"structural_tag": _tag(begin="<call>", end="<call>")}, "<call>", "<call>"),
    (
        {"structural_tag": json.dumps({
            "structures": [{"begin": "<call>f", "schema": {}, "end": "<call>"}],
            "triggers": ["<call>"],
        })},
        'x{"x":1,"x":2}<call>f',
        '<call>é{"x":1,"x":2}',
    ),
    ({"ebnf": 'start: "<|a|>" v ("," v)*\nv: %json {} | "{" /[a-z]+/ "}"'}, "<|a|>{x},1,", ",{y}"),
    ({"ebnf": 'start: "(" start ")" | %json {"additionalProperties": true}'}, "((", "))"),
]  # fmt: skip


def _tokens(vocabulary: Vocabulary, text: str) -> list[int]:
    """With the special token that the text names."""
    first, *parts = text.split("<call>")
    found = list(encode(vocabulary, first.encode()))
    for part in parts:
        found += [vocabulary.special_tokens["<call>"], *encode(vocabulary, part.encode())]
    return found


@pytest.mark.parametrize(("source", "before", "behind"), ROUTES, ids=lambda r: str(r)[:40])
def test_keys_come_once_within_other_text(source: dict[str, str], before: str, behind: str) -> None:
    """Wherever JSON stands; where it is free text, keys may come as they like."""
    compiler = GrammarCompiler(byte_vocabulary(["<call>"]))
    grammar = compiler.compile(**source)
    for text in [*TWICE, *ONCE, "12", "true", "-1.5e3"]:
        matcher = grammar.matcher()
        way = _tokens(compiler.vocabulary, f"{before}{text}{behind}")
        taken = all(map(matcher.advance, way)) and matcher.is_accepting()
        assert taken is (text not in TWICE), text


@pytest.mark.parametrize(("source", "before", "behind"), ROUTES, ids=lambda r: str(r)[:40])
def test_the_mask_within_other_text_goes_forwards_and_back(
    source: dict[str, str], before: str, behind: str
) -> None:
    """Any way to a place gives the mask of a matcher that has come there at once."""
    compiler = GrammarCompiler(byte_vocabulary(["<call>"]))
    grammar = compiler.compile(**source)
    vocabulary = compiler.vocabulary
    way = _tokens(vocabulary, f'{before}{{"x":{{"y":1,"y')
    quote, z = encode(vocabulary, b'"z')
    matcher = grammar.matcher()
    masks = []
    for token in way:
        masks.append(matcher.allowed_mask())
        assert matcher.advance(token)
    assert not matcher.allowed_mask()[quote] and matcher.allowed_mask()[z]
    assert not matcher.advance(quote) and "there twice" in matcher.error()
    assert matcher.rollback_refused() == 0
    for back in (1, 4, 9, len(way)):
        matcher.rollback(back)
        for at in range(len(way) - back, len(way)):
            assert np.array_equal(matcher.allowed_mask(), masks[at])
            assert matcher.advance(way[at])
    for token in _tokens(vocabulary, f'z":1}}}}{behind}'):
        assert matcher.advance(token)
    assert matcher.is_accepting()


@pytest.mark.parametrize(("source", "before", "behind"), ROUTES[1:2] + ROUTES[5:])
def test_what_a_random_model_writes_within_other_text_has_each_key_once(
    source: dict[str, str], before: str, behind: str
) -> None:
    compiler = GrammarCompiler(byte_vocabulary())
    grammar = compiler.compile(**source)
    few, ended = _Few(compiler.vocabulary), 0
    for seed in range(8):
        generated = few.of(seed).generate(grammar)
        if generated.text is not None:
            text = generated.text
            count = 1 if before == "[" else len(text) - len(text.lstrip(b"("))
            _pairs(text[count : len(text) - count])
            ended += 1
    assert ended >= 4


def test_where_no_island_is_open_nothing_is_followed() -> None:
    compiler = GrammarCompiler(byte_vocabulary())
    closed = '{"type": "object", "properties": {"a": {}}, "additionalProperties": false}'
    closed = closed.replace("{}", '{"type": "boolean"}')
    assert isinstance(compiler.compile(ebnf=f'start: "x" %json {closed}'), LLGuidanceGrammar)
    assert names_tokens("start: <|a|> %json {}") and names_tokens("start: <[5]>")
    assert not names_tokens('start: "<|a|>" /<[a]/ %json {"enum": ["<|a|>"]} // <|a|>')


def _pairs(text: bytes) -> Any:
    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), text
        return dict(pairs)

    return json.loads(text, object_pairs_hook=checked)


@pytest.mark.parametrize("schema", OPEN, ids=json.dumps)
def test_what_a_random_model_writes_has_each_key_once(
    compiler: GrammarCompiler, schema: Any
) -> None:
    """With few letters to choose from, it would repeat keys all the time. The mask holds it: hardly
    a token is refused, and nothing is ever taken back."""
    grammar = compiler.compile(json_schema=schema, strict=True)
    assert "checked" not in grammar.backend
    assert not grammar.matcher().can_rollback
    few = _Few(compiler.vocabulary)
    ended = 0
    for seed in range(8):
        generated = few.of(seed).generate(grammar)
        if generated.text is not None:
            _pairs(generated.text)
            ended += 1
    assert ended >= 5


class _Few:
    """Random models that write few different letters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def of(self, seed: int) -> RandomModel:
        model = RandomModel(self._vocabulary, seed, patience=30)
        drawn = model._draw

        def draw(matcher: Any, length: int) -> int | None:
            words = list(self._vocabulary.token_bytes)
            allowed = matcher.allowed_mask()
            usual = np.array([len(w) == 1 and w in b'ab1,:{}[]"' for w in words])
            usual[list(self._vocabulary.eos_token_ids)] = True

            class Narrow:
                def allowed_mask(self) -> np.ndarray:
                    narrow = allowed & usual
                    return narrow if narrow.any() else allowed

            return drawn(Narrow(), length)  # type: ignore[arg-type]

        model._draw = draw  # type: ignore[method-assign]
        return model


@pytest.mark.parametrize("schema", CLOSED, ids=json.dumps)
def test_where_all_keys_are_named_nothing_is_checked(schema: Any) -> None:
    assert not has_open_keys(PreparedSchema(schema).mask_schema)


@pytest.mark.parametrize("schema", OPEN, ids=json.dumps)
def test_open_keys_are_found(schema: Any) -> None:
    assert has_open_keys(PreparedSchema(schema).mask_schema)


def test_tokens_that_hold_a_key_or_its_end(compiler: GrammarCompiler) -> None:
    """The mask is without those that end a key that is there; one that holds a whole key is refused
    where it stands, and another is drawn in its place."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [('"', "a"), ('"a', '"'), ('"a"', ":"), ("a", '"'), ("1", ",")]
    pieces = [*alphabet, '"a', '"a"', '"a":', 'a"', "1,"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    vocabulary = Vocabulary.from_tokenizer(tokenizer, eos_token_ids=[len(pieces)])
    number = {data: i for i, data in enumerate(vocabulary.token_bytes)}
    made = GrammarCompiler(vocabulary, config=compiler.config)
    matcher = made.compile(json_schema={"type": "object"}, whitespace="compact").matcher()
    for piece in (b"{", b'"a":', b"1,"):
        assert matcher.advance(number[piece])
    assert not matcher.advance(number[b'"a":']) and "there twice" in matcher.error()
    assert matcher.rollback_refused() == 0
    allowed = matcher.allowed_mask()
    assert not allowed[number[b'"a":']] and not allowed[number[b'"a"']] and allowed[number[b'"']]
    assert matcher.advance(number[b'"'])
    allowed = matcher.allowed_mask()
    assert allowed[number[b"a"]] and not allowed[number[b'a"']]
    assert matcher.mask_row() is None
    assert matcher.advance(number[b"a"])
    allowed = matcher.allowed_mask()
    assert allowed[number[b"a"]] and not allowed[number[b'"']]
    matcher.rollback(2)
    assert matcher.advance(number[b'"']) and matcher.advance(number[b"b"])
    assert matcher.allowed_mask()[number[b'"']]
