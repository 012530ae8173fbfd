"""Thoughts before a constrained answer: what may come, what is forced, and what is taken back."""

import random
import re
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.contracts.messages import ThoughtTokens
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.thoughts import Phase, ThoughtMatcher, Watch

ENDS = ["<eos>", "<eot>"]
MORE = [
    "<think>", "</think>", "<", "</", "think", ">", ">\n\n", "th", "ink>", "></", ">x", "</think>",
]  # fmt: skip


def compiler_of(special: bool) -> GrammarCompiler:
    """Bytes, and tokens that hold parts of the tags, or the tags as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tags = ["<think>", "</think>"] if special else []
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in [*ENDS, *tags]])
    if not special:
        tokenizer.add_tokens([AddedToken(one, normalized=False) for one in dict.fromkeys(MORE)])
    ends = [tokenizer.token_to_id(one) for one in ENDS]
    return GrammarCompiler(tokenizer, eos_token_ids=ends)


COMPILERS = {special: compiler_of(special) for special in (False, True)}


def ids_of(compiler: GrammarCompiler, text: str) -> tuple[int, ...]:
    """One token a byte, but for special tokens."""
    special, found = compiler.vocabulary.special_tokens, list[int]()
    for part in re.split(r"(<think>|</think>)", text):
        whole = [special[part]] if part in special else None
        found += whole or [compiler.vocabulary.byte_tokens[byte] for byte in part.encode()]
    return tuple(found)


def matcher_of(
    special: bool,
    regex: str | None = "[a-z]{2,4}",
    begin: str = "",
    then: str = "",
    budget: int | None = None,
    stops: Sequence[int] = (),
    schema: object = None,
) -> ThoughtMatcher:
    compiler = COMPILERS[special]
    thoughts = ThoughtTokens(
        ids_of(compiler, "</think>"),
        ids_of(compiler, begin),
        ids_of(compiler, "\n\n"),
        ids_of(compiler, then),
        ids_of(compiler, "\n</think>"),
        budget,
        tuple(stops),
        special,
    )
    inner = None
    if schema is not None:
        inner = compiler.compile(json_schema=schema).matcher()
    elif regex is not None:
        inner = compiler.compile(regex=regex).matcher()
    return ThoughtMatcher(inner, thoughts, compiler.vocabulary)


def text_of(special: bool, ids: Sequence[int]) -> str:
    vocabulary = COMPILERS[special].vocabulary
    named = {token: content for content, token in vocabulary.special_tokens.items()}
    return "".join(
        named[token] if token in named else vocabulary.token_bytes[token].decode("latin-1")
        for token in ids
    )


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("begin", ["", "<think>"])
@pytest.mark.parametrize("then", ["", "=>"])
def test_whatever_is_drawn_is_thoughts_and_an_answer(special: bool, begin: str, then: str) -> None:
    """Also with tokens taken back: what was is again as if they had never been there."""
    ends = COMPILERS[special].vocabulary.eos_token_ids
    thought = re.escape(begin) + r"(?P<thoughts>.*?)</think>\s*"
    whole = re.compile(
        f"(?:{thought}){'?' if begin else ''}{then}(?P<answer>[a-z]{{2,4}})", re.DOTALL
    )
    seen = set()
    for seed in range(60):
        rng, budget = random.Random(seed), random.Random(seed).choice([0, 3, 20, None])
        matcher = matcher_of(special, begin=begin, then=then, budget=budget)
        tags = [*ids_of(COMPILERS[special], begin), *ids_of(COMPILERS[special], "</think>")]
        ids: list[int] = []
        while not matcher.is_finished() and len(ids) < 400:
            allowed = matcher.allowed_mask()
            choices = np.flatnonzero(allowed).tolist()
            forced = matcher.forced_tokens()
            assert all(allowed[token] for token in forced[:1])
            likely = [token for token in tags if allowed[token]]
            token = rng.choice(likely if likely and rng.random() < 0.6 else choices)
            if token in ends:
                assert matcher.is_accepting()
                break
            if rng.random() < 0.2 and ids:
                back = rng.randrange(1, 1 + min(len(ids), 12))
                matcher.rollback(back)
                del ids[-back:]
                again = matcher_of(special, begin=begin, then=then, budget=budget)
                assert all(again.advance(one) for one in ids)
                assert (again.allowed_mask() == matcher.allowed_mask()).all()
                assert again.forced_tokens() == matcher.forced_tokens()
                continue
            for one in forced or [token]:
                assert matcher.advance(one)
                assert not (matcher.place.unfinished and matcher.is_finished())
                assert not (matcher.place.unforced and matcher.forced_tokens())
                ids.append(one)
        if len(ids) >= 400:
            continue
        found = whole.fullmatch(text_of(special, ids))
        assert found is not None, text_of(special, ids)
        seen.add(found["thoughts"] is None)
        if budget is not None and found["thoughts"]:
            assert len(ids_of(COMPILERS[special], found["thoughts"].rstrip("\n"))) <= 8 * (
                budget + 8
            )
    assert seen >= ({True, False} if begin else {False})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_behind_the_budget_they_are_ended(special: bool, budget: int) -> None:
    matcher, compiler = matcher_of(special, budget=budget), COMPILERS[special]
    letter = compiler.vocabulary.byte_tokens[ord("a")]
    for _ in range(budget):
        assert not matcher.forced_tokens() and matcher.advance(letter)
    closing = ids_of(compiler, "\n</think>\n\n")
    assert tuple(matcher.forced_tokens()) == closing
    for token in closing:
        assert np.flatnonzero(matcher.allowed_mask()).tolist() == [token]
        assert not matcher.is_accepting() and not matcher.advance(letter)
        assert matcher.advance(token)
    assert matcher.advance(letter) and matcher.advance(letter) and matcher.is_accepting()


@pytest.mark.parametrize("written, forced", [("</think>", "\n\n"), ("</think>\n\n", "")])
def test_white_space_that_the_model_writes_is_not_written_again(written: str, forced: str) -> None:
    matcher, vocabulary = matcher_of(False), COMPILERS[False].vocabulary
    *first, last = ids_of(COMPILERS[False], "</think>")
    tokens = [*first, vocabulary.token_of(b">\n\n") if not forced else last]
    for token in tokens:
        assert matcher.advance(token)
    assert tuple(matcher.forced_tokens()) == ids_of(COMPILERS[False], forced)
    assert written.endswith(vocabulary.token_bytes[tokens[-1]].decode())


def test_no_token_runs_over_the_end() -> None:
    """The constraint begins with a token: one that holds the end and more text cannot come."""
    matcher, vocabulary = matcher_of(False), COMPILERS[False].vocabulary
    over, whole = vocabulary.token_of(b">x"), vocabulary.token_of(b">\n\n")
    for token in ids_of(COMPILERS[False], "so</think"):
        assert matcher.allowed_mask()[over] and matcher.advance(token)
    allowed = matcher.allowed_mask()
    assert not allowed[over] and allowed[whole] and allowed[vocabulary.byte_tokens[ord("!")]]
    # What is free behind the thoughts may begin with any token.
    free = matcher_of(False, regex=None)
    for token in ids_of(COMPILERS[False], "so</think"):
        assert free.advance(token)
    assert free.allowed_mask()[over] and free.advance(over) and free.free


@pytest.mark.parametrize("special", [False, True])
def test_what_ends_a_text(special: bool) -> None:
    """Nothing, within thoughts, where a constraint is still to be held; without one the end of the
    sequence, as ever. Other stop tokens end nothing there."""
    eos = COMPILERS[special].vocabulary.eos_token_ids[0]
    stop = COMPILERS[special].vocabulary.byte_tokens[ord("a")]
    held = matcher_of(special, stops=[stop])
    assert not held.allowed_mask()[eos] and not held.advance(eos) and held.ignores(stop)
    free = matcher_of(special, regex=None, stops=[stop])
    assert free.allowed_mask()[eos] and free.is_accepting() and free.ignores(stop)
    for matcher in (held, free):
        for token in ids_of(COMPILERS[special], "</think>\n\n"):
            assert matcher.advance(token)
        assert not matcher.ignores(stop)
    assert free.free and not held.free
    # The engine drops a free matcher: a draft into free text must allow as much as no mask does.
    assert free.allowed_mask().all()
    assert not all(COMPILERS[special].vocabulary.token_bytes[:256])  # one that is no text, either


def test_a_check_takes_back_no_thoughts() -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}
    matcher, compiler = matcher_of(True, schema=schema, budget=2), COMPILERS[True]
    ids = [*ids_of(compiler, "ab\n</think>\n\n"), *ids_of(compiler, "[1,")]
    for token in ids:
        assert matcher.advance(token)
    assert matcher.can_rollback and matcher.settled() == len(ids) - 3
    refused = ids_of(compiler, "1")[0]
    taken = matcher.allowed_mask()[refused] and matcher.advance(refused)
    if taken:  # it may be part of a longer number
        refused = ids_of(compiler, "]")[0]
        assert not matcher.advance(refused)
    undone = matcher.rollback_refused()
    assert undone is not None and matcher.settled() == len(ids) - 3
    for token in ids_of(compiler, "2]"):
        assert matcher.advance(token), matcher.error()
    assert matcher.is_finished()


def test_where_thoughts_stand_however_they_are_cut_into_tokens() -> None:
    compiler = COMPILERS[False]
    vocabulary = compiler.vocabulary
    thoughts = ThoughtTokens(ids_of(compiler, "</think>"), ids_of(compiler, "<think>"))
    watch = Watch(thoughts, vocabulary.token_bytes)
    tokens = list(filter(None, dict.fromkeys(vocabulary.token_bytes)))
    for seed in range(40):
        rng, text, place = random.Random(seed), b"<think>a</thin</think>b", watch.start
        at, ended = 0, None
        while at < len(text):
            fits = [d for d in tokens if text.startswith(d, at)]
            data = rng.choice(fits)
            place = watch.after(place, vocabulary.token_of(data))
            at += len(data)
            if place.phase is Phase.BEHIND and ended is None:
                ended = at
        assert ended in (22, 23)
    assert watch.after(watch.start, vocabulary.token_of(b"th")).never
