"""Text to token ids, piece by piece, with the result of tokenizing the whole at once.

Wraps a Hugging Face fast tokenizer (`tokenizer.json`). Three things are done here rather than in
the library, because a branch grows in pieces and is continued after generated tokens:

- *Added tokens* (`<|im_start|>`, `<think>` ...) are cut out of the text here, so that special ones
  are recognised in template text only.
- *The dummy prefix* (the space that SentencePiece-like tokenizers put before a text) is taken out
  of the tokenizer and added here where the original would: never in the middle of a branch.
- *The stable prefix*: the tokens that no later text can change (see `settle`).

The way back is `output_text.Detokenizer`.

Sections: vocabulary, pieces, tokenizer.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.model.checkpoint.source import ModelSource
from rootlace.wire.errors import InvalidRequest

# Vocabulary ---------------------------------------------------------------------------------------
#
# What each token is: its spelling, whether it is special, the bytes it stands for.


SPACE = "\u2581"  # how SentencePiece writes a space

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class AddedToken:
    """A token beside the model's own; the flags are those of `tokenizer.json`."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


class Vocabulary:
    """The tokens of a Hugging Face fast tokenizer. Thread-safe: only caches change.

    `vocab_size` counts added tokens. `token_bytes` and `visible_bytes` are the tokens' bytes, in
    the latter none for special ones.
    """

    def __init__(self, fast: FastTokenizer, decoder: dict[str, Any] | None) -> None:
        """`decoder` is that of `tokenizer.json`: it says how tokens become text."""
        self.fast = fast
        self.vocab_size = fast.get_vocab_size(with_added_tokens=True)
        self.added = {
            id_: AddedToken(id_, t.content, t.special, t.lstrip, t.rstrip, t.single_word)
            for id_, t in fast.get_added_tokens_decoder().items()
        }
        self.by_content = {token.content: token for token in self.added.values()}
        self.token_bytes = TokenBytes(self, decoder)
        self.visible_bytes = TokenBytes(self, decoder, skip_special_tokens=True)

    def id_of(self, content: str) -> int | None:
        """The id of the token spelled so in the vocabulary."""
        token = self.by_content.get(content)
        return token.id if token else self.fast.token_to_id(content)

    def content(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        token = self.added.get(token_id)
        return token.content if token else self.fast.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        token = self.added.get(token_id)
        return token is not None and token.special


class TokenBytes(dict[int, bytes]):
    """The bytes that each token stands for, converted when first looked up.

    With `skip_special_tokens` special ones stand for nothing. A dictionary, because looking up a
    known token then costs no Python call.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        decoder: dict[str, Any] | None,
        skip_special_tokens: bool = False,
    ) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self.kind, self.strips_first = _decoder_kind(decoder)

    def __missing__(self, token_id: int) -> bytes:
        content = self._vocabulary.content(token_id)
        if content is None or (self._skip and self._vocabulary.is_special(token_id)):
            data = b""
        else:
            data = self._convert(content)
        self[token_id] = data
        return data

    def shows_any(self, token_ids: Iterable[int]) -> bool:
        """Whether one of them is not skipped."""
        return any(not (self._skip and self._vocabulary.is_special(i)) for i in token_ids)

    def _convert(self, content: str) -> bytes:
        if self.kind == "byte_level":
            alphabet = _byte_level_alphabet()
            try:
                return bytes(alphabet[c] for c in content)
            except KeyError:  # an added token with characters outside the alphabet
                return content.encode("utf-8", "replace")
        if self.kind == "byte_fallback" and (match := _BYTE_TOKEN.fullmatch(content)):
            return bytes([int(match[1], 16)])
        return content.replace(SPACE, " ").encode("utf-8", "replace")


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the rest for 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    table.update({chr(256 + n): b for n, b in enumerate(others)})
    return table


Kind = Literal["byte_level", "byte_fallback", "metaspace", "other"]


def _decoder_kind(spec: dict[str, Any] | None) -> tuple[Kind, bool]:
    """How tokens become text, and whether the first space of a text is stripped."""
    if spec is None:
        return "other", False
    steps = spec.get("decoders", [spec])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds == ["Metaspace"]:
        return "metaspace", steps[0].get("prepend_scheme", "always") != "never"
    replaces_space = steps[0].get("pattern") == {"String": SPACE}
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and replaces_space:
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if steps[3:] in ([], [strip]):
            return "byte_fallback", bool(steps[3:])
    return "other", False


# Pieces -------------------------------------------------------------------------------------------
#
# Text that is not tokenized yet, as runs of template text and content.


class Piece(NamedTuple):
    """A run of text; special tokens in it are recognised only with `special`."""

    text: str
    special: bool = False


@dataclass(frozen=True)
class Joined:
    """Pieces as one string. `borders[i]` is where run i ends; neighbours differ in `special`."""

    text: str
    borders: tuple[int, ...]
    flags: tuple[bool, ...]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Joined:
        texts: list[str] = []
        borders: list[int] = []
        flags: list[bool] = []
        length = 0
        for piece in pieces:
            if not piece.text:
                continue
            texts.append(piece.text)
            length += len(piece.text)
            if flags and flags[-1] == piece.special:
                borders[-1] = length
            else:
                borders.append(length)
                flags.append(piece.special)
        return cls("".join(texts), tuple(borders), tuple(flags))

    def after(self, start: int) -> tuple[Piece, ...]:
        """The pieces from character `start` on."""
        pieces = []
        begin = 0
        for border, flag in zip(self.borders, self.flags, strict=True):
            if border > start:
                pieces.append(Piece(self.text[max(begin, start) : border], flag))
            begin = border
        return tuple(pieces)


# Tokenizer ----------------------------------------------------------------------------------------


# A break that no later text can undo: something, then white space, then a letter, digit or ASCII
# punctuation, so that the run of white space is complete; or a letter before CJK punctuation that
# is followed by something. Combining marks and joiners are left out: they may still merge.
_BREAK = re.compile(r"(?<=\S)\s+(?=[^\W_]|[!-/:-@\[-`{-~])|(?<=[^\W\d_])[，。！？；：、](?=\S)")
_BREAKING = re.compile(rf"[\s{SPACE}，。！？；：、]")
"""What a break may consist of."""


@dataclass(frozen=True)
class _Dummy:
    """The dummy prefix: where it is added, and whether also before a text that has a space."""

    where: Literal["never", "first", "always"] = "never"
    even_before_space: bool = False


@dataclass(frozen=True)
class _Atom:
    """An added token found in text[start:end] (white space it swallows included)."""

    token: AddedToken
    start: int
    end: int


class Tokenizer(Vocabulary):
    """A vocabulary, and how text is cut into its tokens. Thread-safe.

    `bos_ids` is what the post-processor puts before a sequence, `end_ids` what it puts behind one.
    """

    def __init__(self, fast: FastTokenizer, config: dict[str, Any] | None = None) -> None:
        self.config = config or {}
        self.bos_ids, _, self.end_ids = _around(fast.encode("a"))
        self._around_pair = _around(fast.encode("a", "a"))
        spec = _without_vocabulary(fast)
        decoder = spec["decoder"]
        if _may_have_dummy(fast):
            spec = json.loads(fast.to_str())
        self._dummy = _remove_dummy_prefix(spec)
        if self._dummy.where != "never":
            fast = FastTokenizer.from_str(json.dumps(spec))
        fast.post_processor = None
        fast.no_padding()
        fast.no_truncation()
        fast.encode_special_tokens = True
        super().__init__(fast, decoder)
        self._any_added = _matcher(self.added.values())
        self._plain_added = _matcher(t for t in self.added.values() if not t.special)
        self._starts = _proper_prefixes(self.added.values())
        self._plain_starts = _proper_prefixes(t for t in self.added.values() if not t.special)
        vocabulary = fast.get_vocab(with_added_tokens=False)
        self._splits_at_spaces = fast.pre_tokenizer is None and _never_crosses_space(
            spec, vocabulary
        )
        self._splits = fast.pre_tokenizer is not None
        self._made_of_text = frozenset(
            token.id
            for token in self.added.values()
            if token.special and token.content in vocabulary and len(token.content) > 1
        )
        """Special tokens that the model's own vocabulary has: some models make them of any text
        that is spelt so."""
        self._special_has_break = any(
            _BREAKING.search(self.added[token].content) for token in self._made_of_text
        )
        self.longest_token = max((len(c) for c in (*vocabulary, *self.by_content)), default=1)

    @classmethod
    def read(cls, source: ModelSource) -> Tokenizer:
        """That of a model. Raises InvalidRequest where there is none that can be read."""
        text = source.tokenizer_json()
        try:
            fast = FastTokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequest(f"{source.path}: tokenizer.json: {error}") from error
        return cls(fast, source.tokenizer_config())

    # ------------------------------------------------------------ whole texts

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a whole text; special tokens in it are recognised."""
        return self.encode_pieces((Piece(text, special=True),), begin=add_special_tokens)

    def encode_pair(self, text: str, other: str) -> list[int]:
        """Ids of two whole texts as the post-processor joins them, for models that are trained on
        pairs. No special tokens are recognised in them. Raises InvalidRequest as `encode` does."""
        before, between, behind = self._around_pair
        first, second = (self.encode_pieces((Piece(one, special=False),)) for one in (text, other))
        return [*before, *first, *between, *second, *behind]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence."""
        table = self.visible_bytes if skip_special_tokens else self.token_bytes
        if table.kind == "other":
            return self.fast.decode([*token_ids], skip_special_tokens=skip_special_tokens)
        data = b"".join(map(table.__getitem__, token_ids))
        if table.strips_first:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    # ------------------------------------------------------------ pieces of a branch

    def encode_pieces(
        self, pieces: Sequence[Piece], previous: int | None = None, begin: bool = False
    ) -> list[int]:
        """Ids of the pieces as if they had been one string, after a token `previous`.

        `previous=None` means the start of a sequence; with `begin` it starts as the tokenizer's
        post-processor would (BOS). Raises InvalidRequest for text that is not valid Unicode.
        """
        joined = Joined.of(pieces)
        ids = list(self.bos_ids) if begin and previous is None else []
        position, after = 0, previous
        for atom in self._atoms(joined):
            if atom.start > position:
                ids += self._ordinary(joined.text[position : atom.start], after, position == 0)
            ids.append(atom.token.id)
            position, after = atom.end, atom.token.id
        return ids + self._ordinary(joined.text[position:], after, position == 0)

    def settle(
        self, pieces: Sequence[Piece], previous: int | None = None, begin: bool = False
    ) -> tuple[list[int], tuple[Piece, ...]]:
        """The ids that no later text can change, and the pieces that stay pending.

        Encoding what stays pending later, followed by whatever comes, gives the ids that the joined
        string would have given. The end of the stable part is the last border of two pre-tokens
        that lies at a break between words which is complete (`_BREAK`): pre-tokenizers look ahead
        within a word or a run of white space, never past it. A tokenizer without a pre-tokenizer
        is split at spaces if no token of its vocabulary contains an inner space (then no merge can
        cross one); otherwise only added tokens are borders.
        """
        joined = Joined.of(pieces)
        text = joined.text
        limit = self._unfinished_from(joined)
        ids = list(self.bos_ids) if begin and previous is None else []
        done, after = 0, previous
        for atom in self._atoms(joined):
            open_ended = atom.token.rstrip or atom.token.single_word
            if atom.end > limit or (open_ended and atom.end == len(text)):
                limit = min(limit, atom.start)
                break
            ids += self._ordinary(text[done : atom.start], after, done == 0)
            ids.append(atom.token.id)
            done, after = atom.end, atom.token.id
        stable, length = self._stable_text(text[done:limit], after, done == 0)
        ids += stable
        done += length
        if not done:
            return [], tuple(joined.after(0))
        return ids, joined.after(done)

    # ------------------------------------------------------------ single tokens

    def token_text(self, token_id: int) -> str:
        """One token's own text; a part of a character shows as U+FFFD, an unknown id as ""."""
        if self.token_bytes.kind == "other":
            return self.fast.decode([token_id], skip_special_tokens=False)
        return self.token_bytes[token_id].decode("utf-8", "replace")

    # ------------------------------------------------------------ parts of it

    def _atoms(self, joined: Joined) -> list[_Atom]:
        """Added tokens in the text, leftmost, longest; special ones in special runs only."""
        matcher = self._any_added if True in joined.flags else self._plain_added
        if matcher is None:
            return []
        text, found, position, last, run = joined.text, [], 0, 0, 0
        while match := matcher.search(text, position):
            token = self.by_content[match.group()]
            start, end = match.span()
            while joined.borders[run] <= start:
                run += 1
            if token.special and not (joined.flags[run] and end <= joined.borders[run]):
                plain = self._plain_added.match(text, start) if self._plain_added else None
                if plain is None:
                    position = start + 1
                    continue
                token, end = self.by_content[plain.group()], plain.end()
            if token.single_word and not _stands_alone(text, start, end):
                position = start + 1
                continue
            if token.lstrip:
                start = last + len(text[last:start].rstrip())
            if token.rstrip:
                end += len(text[end:]) - len(text[end:].lstrip())
            found.append(_Atom(token, start, end))
            position = last = end
        return found

    def _unfinished_from(self, joined: Joined) -> int:
        """Where a tail begins that may grow into an added token; len(text) if there is none."""
        text = joined.text
        starts = self._starts if joined.flags and joined.flags[-1] else self._plain_starts
        if not starts:
            return len(text)
        longest = max(map(len, starts))
        for start in range(max(0, len(text) - longest), len(text)):
            if text[start:] in starts:
                return start
        return len(text)

    def _prefix(self, text: str, after: int | None, first: bool) -> str:
        """The dummy prefix that the original tokenizer would put before `text`."""
        dummy = self._dummy
        if dummy.where == "never" or not text:
            return ""
        if text[0] in (" ", SPACE) and not dummy.even_before_space:
            return ""
        if after is None:
            return " " if first else ""
        # After an added token the library tokenizes afresh; after any other token we continue.
        return " " if dummy.where == "always" and after in self.added else ""

    def _ordinary(self, text: str, after: int | None, first: bool) -> list[int]:
        """Ids of text in which no special token is recognised."""
        if not text:
            return []
        encoding, shift = self._encode_text(text, after, first)
        ids = encoding.ids
        if self._made_of_text.isdisjoint(ids) or not (cuts := self._cuts(text, encoding, shift)):
            return ids
        return self._parts(text, cuts, self._prefix(text, after, first))

    def _cuts(self, text: str, encoding: Encoding, shift: int) -> list[int]:
        """Where `text` is cut so that no part of it is made a special token."""
        cuts = self._spelt_special(text, encoding, shift)
        more = {*cuts}
        while more:
            # What is behind a cut may spell another one, which began before it.
            parts = self._encode_parts(text, cuts, " " * shift)
            begins = zip((0, *cuts), parts, strict=True)
            more = {
                begin + at
                for begin, (part, found) in begins
                for at in self._spelt_special(part, found, 0 if begin else shift)
            }
            more -= {*cuts, len(text)}
            cuts = sorted({*cuts, *more})
        return cuts

    def _spelt_special(self, text: str, encoding: Encoding, shift: int) -> list[int]:
        """Behind the first characters of special tokens that `text` only spells."""
        if self._made_of_text.isdisjoint(encoding.ids):
            return []
        cuts = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._made_of_text:
                # What is unknown may be a special token, too, and is not spelt so.
                spelt = text[max(start - shift, 0) : end - shift].casefold()
                content = self.added[token].content.casefold()
                if (at := spelt.find(content)) >= 0:
                    cuts.append(max(start - shift, 0) + at + 1)
        return cuts

    def _encode_text(self, text: str, after: int | None, first: bool) -> tuple[Encoding, int]:
        """The library's encoding, and the length of the dummy prefix in it."""
        prefix = self._prefix(text, after, first) if self._dummy.where != "never" else ""
        try:
            # Only the batch call releases the interpreter's lock.
            encoding = self.fast.encode_batch([prefix + text], add_special_tokens=False)[0]
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(f"text cannot be tokenized: {error}") from error
        return encoding, len(prefix)

    def _stable_text(self, text: str, after: int | None, first: bool) -> tuple[list[int], int]:
        """Ids of the part of `text` that is stable, and its length in characters."""
        if not (self._splits or self._splits_at_spaces) or not _BREAK.search(text):
            return [], 0
        encoding, shift = self._encode_text(text, after, first)
        cuts = self._cuts(text, encoding, shift)
        borders = self._borders(text, {m.start() for m in _BREAK.finditer(text)}, encoding, shift)
        if cuts:
            ascending = [at for _, at in borders][::-1]
            return self._stable_parts(text, cuts, ascending, self._prefix(text, after, first))
        for count, at in borders:
            return encoding.ids[:count], at
        return [], 0

    def _borders(
        self, text: str, breaks: Collection[int], encoding: Encoding, shift: int
    ) -> Iterator[tuple[int, int]]:
        """Those of two pre-tokens that lie at one of the breaks of `text`, last first: how many
        tokens are before it, and where it is. Before `text` there was a dummy prefix of `shift`."""
        offsets, words = encoding.offsets, encoding.word_ids
        for i in range(len(offsets) - 1, 0, -1):
            at = offsets[i][0] - shift
            border = words[i] != words[i - 1] if self._splits else text[at] == " "
            if border and at in breaks and offsets[i - 1][1] - shift <= at:
                yield i, at

    def _stable_parts(
        self, text: str, cuts: list[int], borders: list[int], prefix: str
    ) -> tuple[list[int], int]:
        """The same for text that spells special tokens: what is before the last of its `borders`
        (ascending) that is one of the part between two cuts, too. No later text changes the cuts
        before it, since these are seen from the tokens."""
        if self._special_has_break:
            return [], 0
        ends = [0, *cuts, len(text)]
        for number in range(len(cuts), -1, -1):
            begin, end = ends[number], ends[number + 1]
            inside = []
            while borders and borders[-1] >= begin:
                inside.append(borders.pop() - begin)
            if not inside:
                continue
            part, put = text[begin:end], "" if number else prefix
            [encoding] = self.fast.encode_batch([put + part], add_special_tokens=False)
            for count, at in self._borders(part, inside, encoding, len(put)):
                if encoding.ids[count - 1] in self.added:
                    continue  # behind it what follows would be taken for another text
                before = self._parts(text[:begin], cuts[: number - 1], prefix) if number else []
                return before + encoding.ids[:count], begin + at
        return [], 0

    def _parts(self, text: str, cuts: list[int], prefix: str) -> list[int]:
        """Ids of what is between two cuts, each by itself."""
        parts = self._encode_parts(text, cuts, prefix)
        return [token for _, found in parts for token in found.ids]

    def _encode_parts(self, text: str, cuts: list[int], prefix: str) -> list[tuple[str, Encoding]]:
        parts = [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]
        given = [prefix + parts[0], *parts[1:]]
        found = self.fast.encode_batch(given, add_special_tokens=False)
        return [*zip(parts, found, strict=True)]


def _around(encoding: Encoding) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What the post-processor put before a text or two, between them, and behind."""
    own = [at for at, mask in enumerate(encoding.special_tokens_mask) if not mask]
    if not own:
        return tuple(encoding.ids), (), ()
    first, last = own[0], own[-1]
    between = [one for one in range(first, last) if one not in own]
    ids = encoding.ids
    return tuple(ids[:first]), tuple(ids[at] for at in between), tuple(ids[last + 1 :])


def _without_vocabulary(fast: FastTokenizer) -> dict[str, Any]:
    """The tokenizer's JSON but for the model's tables, which are megabytes."""

    def state(part: Any) -> Any:
        return None if part is None else json.loads(part.__getstate__())

    return {
        "normalizer": state(fast.normalizer),
        "pre_tokenizer": state(fast.pre_tokenizer),
        "decoder": state(fast.decoder),
        "model": {"type": type(fast.model).__name__},
    }


def _may_have_dummy(fast: FastTokenizer) -> bool:
    return any(
        name in repr(part)
        for part in (fast.normalizer, fast.pre_tokenizer)
        for name in ("Prepend", "Metaspace", "add_prefix_space=True")
    )


def _remove_dummy_prefix(spec: dict[str, Any]) -> _Dummy:
    """Remove the dummy prefix from a tokenizer's JSON, in place; returns how it was added."""
    found = _Dummy()
    normalizer = spec.get("normalizer")
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    kept = [step for step in steps if not _is_space_prepend(step)]
    if len(kept) != len(steps):
        found = _Dummy("always", even_before_space=True)
        spec["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    pre = spec.get("pre_tokenizer")
    for part in (pre or {}).get("pretokenizers", [pre] if pre else []):
        if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            found = _Dummy(part.get("prepend_scheme", "always"))
            part["prepend_scheme"] = "never"
        elif part["type"] == "ByteLevel" and part.get("add_prefix_space"):
            found = _Dummy("always")
            part["add_prefix_space"] = False
    return found


def _is_space_prepend(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Prepend" and step["prepend"] == SPACE)


def _matcher(tokens: Any) -> re.Pattern[str] | None:
    contents = sorted((t.content for t in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents))) if contents else None


def _proper_prefixes(tokens: Any) -> frozenset[str]:
    return frozenset(t.content[:n] for t in tokens for n in range(1, len(t.content)))


def _stands_alone(text: str, start: int, end: int) -> bool:
    def is_word(char: str) -> bool:
        return char.isalnum() or char == "_"

    return not (start and is_word(text[start - 1])) and not (end < len(text) and is_word(text[end]))


def _never_crosses_space(spec: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Whether text may be split before every space that follows something else.

    True if a space is written as U+2581 and no token has one after another character: neither a BPE
    merge nor a unigram piece can then span the split.
    """
    if spec["model"]["type"] not in ("BPE", "Unigram"):
        return False
    normalizer = spec.get("normalizer")
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    only_replaces = bool(steps) and all(
        step["type"] == "Replace"
        and step["pattern"] == {"String": " "}
        and step["content"] == SPACE
        for step in steps
    )
    inner = re.compile(f"[^{SPACE}]{SPACE}")
    return only_replaces and not any(inner.search(token) for token in vocabulary)
