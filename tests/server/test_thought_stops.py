"""Stop strings and patterns count only behind an answer's thoughts."""

import random

import pytest

from rootlace.runtime.contracts.messages import EngineOutput, ThoughtTokens
from rootlace.runtime.server.generate import Sample
from rootlace.runtime.server.stops import Search
from rootlace.runtime.server.tokenizer import Piece, Tokenizer
from rootlace.wire.protocol import SamplingParams


def said(
    tokenizer: Tokenizer,
    text: str,
    stop: tuple[str, ...],
    begin: str,
    sizes: random.Random,
    patterns: tuple[str, ...] = (),
) -> tuple[str, str | int | None, str]:
    """Return the whole text, the chunks' text and the stop of an answer that comes in pieces."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode_pieces((Piece(text, True),), 5)) if text else ()

    thoughts = ThoughtTokens(ids("</think>"), ids(begin))
    searches = tuple(map(Search, patterns))
    params = SamplingParams(stop=stop, skip_special_tokens=False, max_tokens=None)
    sample = Sample(0, tokenizer, [5], params, searches, thoughts)
    tokens, chunks = list(ids(text)), ""
    while tokens and sample.finish is None:
        count = sizes.randrange(1, 4)
        last = count >= len(tokens)
        update = EngineOutput(1, tuple(tokens[:count]), finish="length" if last else None)
        chunk = sample.feed_chunk(update, 1)
        chunks += "" if chunk is None else chunk.text
        del tokens[:count]
    output = sample.output()
    return output.text, output.matched, chunks


@pytest.mark.parametrize("seed", range(4))
def test_they_fire_behind_thoughts(tokenizer: Tokenizer, seed: int) -> None:
    sizes = random.Random(seed)
    thought = "<think>stop, or not? so stop.</think>"
    for text, stop, begin, whole, matched in (
        (f"{thought}now stop it", ("stop",), "<think>", f"{thought}now ", "stop"),
        (thought.removeprefix("<think>") + "a stop", ("stop",), "", None, "stop"),
        (f"{thought}go on", ("stop", "think"), "<think>", f"{thought}go on", None),
        ("<think>stop", ("stop",), "<think>", "<think>stop", None),  # cut within the thoughts
        ("<this stop", ("stop",), "<think>", "<this ", "stop"),  # no thoughts begin
        ("<this", ("<t",), "<think>", "", "<t"),
        ("stop<think>", ("stop",), "<think>", "", "stop"),
    ):
        found, ended, chunks = said(tokenizer, text, stop, begin, sizes)
        expected = text.rpartition("stop")[0] if whole is None else whole
        assert (found, ended) == (expected, matched), text
        assert chunks == found


def test_patterns_too(tokenizer: Tokenizer) -> None:
    text = "<think>1 22 333</think>a 44 b"
    found, ended, chunks = said(tokenizer, text, (), "<think>", random.Random(0), (r"[0-9]{2}",))
    assert (found, ended) == ("<think>1 22 333</think>a ", "[0-9]{2}")
    assert chunks == found
