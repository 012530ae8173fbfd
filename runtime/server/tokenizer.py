"""Text to token ids, piece by piece, as if the whole were tokenized at once; and back.

Wraps a Hugging Face fast tokenizer (`tokenizer.json`). Three things are done here rather than in
the library, because a branch grows in pieces and is continued after generated tokens:

- *Added tokens* (`<|im_start|>`, `<think>` ...) are cut out of the text here, so that special ones
  are recognised in template text only.
- *The dummy prefix* (the space that SentencePiece-like tokenizers put before a text) is taken out
  of the tokenizer and added here where the original would: never in the middle of a branch.
- *The stable prefix*: the tokens that no later text can change (see `settle`).

Sections: pieces, tokenizer, detokenizer.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.model.checkpoint.source import ModelSource
from rootlace.runtime.server.vocabulary import (
    SPACE,
    AddedToken,
    Vocabulary,
    around,
    may_have_dummy,
    never_crosses_space,
    remove_dummy_prefix,
    without_vocabulary,
)
from rootlace.wire.errors import InvalidRequest

# Pieces -------------------------------------------------------------------------------------------
#
# Text that is not tokenized yet, as runs of template text and content.


class Piece(NamedTuple):
    """Run of text; special tokens are recognised in it only with `special`."""

    text: str
    special: bool = False


class Joined(msgspec.Struct, frozen=True):
    """Pieces as one string. `borders[i]` is the end of run i; neighbours differ in `special`."""

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

    def cut(self, start: int, end: int | None = None) -> tuple[Piece, ...]:
        """Return the pieces of characters `start` to `end`."""
        end = len(self.text) if end is None else end
        pieces = []
        begin = 0
        for border, flag in zip(self.borders, self.flags, strict=True):
            first, last = max(begin, start), min(border, end)
            if first < last:
                pieces.append(Piece(self.text[first:last], flag))
            begin = border
        return tuple(pieces)

    def common(self, other: Joined) -> int:
        """Count the characters that both begin with, in the same runs."""
        same, begin = common_prefix(self.text, other.text), 0
        mine, theirs = (zip(one.borders, one.flags, strict=True) for one in (self, other))
        for (border, flag), (other_border, other_flag) in zip(mine, theirs, strict=False):
            if flag != other_flag:
                return min(same, begin)
            if border != other_border:
                return min(same, border, other_border)
            begin = border
        return same


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Count the items that both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # item by item, a long text would take a tenth of a second
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Tokenizer ----------------------------------------------------------------------------------------


# A break that no later text can undo: something, then white space, then a letter, digit or ASCII
# punctuation, so that the run of white space is complete; or a letter before CJK punctuation that
# is followed by something. Combining marks and joiners are left out: they may still merge.
_BREAK = re.compile(r"(?<=\S)\s+(?=[^\W_]|[!-/:-@\[-`{-~])|(?<=[^\W\d_])[，。！？；：、](?=\S)")
_BREAKING = re.compile(rf"[\s{SPACE}，。！？；：、]")
"""Characters of which a break consists."""


class _Atom(msgspec.Struct, frozen=True):
    """Added token found in text[start:end], with the white space that the token swallows."""

    token: AddedToken
    start: int
    end: int


_BEGINS_ITSELF = re.compile(r"(CodeLlama|Llama|Gemma|Cohere)Tokenizer(Fast)?")
"""Classes of transformers 4 that follow `add_bos_token`, whatever tokenizer.json has."""


def _bos_asked_for(fast: FastTokenizer, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the BOS that `add_bos_token` asks for, where a class of transformers adds it though
    tokenizer.json does not (DeepSeek's files)."""
    token = config.get("bos_token")
    content = token.get("content") if isinstance(token, dict) else token
    wanted = config.get("add_bos_token") is True and isinstance(content, str)
    if not wanted or not _BEGINS_ITSELF.fullmatch(str(config.get("tokenizer_class"))):
        return ()
    number = fast.token_to_id(str(content))
    return () if number is None else (number,)


class _Listed(msgspec.Struct, frozen=True):
    """Added token as `tokenizer.json` lists it."""

    id: int
    content: str


class _File(msgspec.Struct, frozen=True):
    """Part of a `tokenizer.json` that `_check_numbers` compares."""

    added_tokens: list[_Listed] = []


def _check_numbers(fast: FastTokenizer, text: str) -> None:
    """Raise ValueError where the library gave an added token another id than the file. The library
    numbers tokens that the model's vocabulary lacks consecutively, whatever the file says."""
    for token in msgspec.json.decode(text, type=_File).added_tokens:
        number = fast.token_to_id(token.content)
        if number != token.id:
            raise ValueError(
                f"the added token {token.content!r} has id {token.id}, and the library tokenizers "
                f"gives it {number}: added tokens follow the vocabulary without a gap"
            )


class Tokenizer(Vocabulary):
    """Vocabulary, and the rules that cut text into its tokens. Thread-safe.

    The post-processor puts `bos_ids` before a sequence, and `end_ids` behind one.
    """

    def __init__(self, fast: FastTokenizer, config: dict[str, Any] | None = None) -> None:
        self.config = config or {}
        self.bos_ids, _, self.end_ids = around(fast.encode("a"))
        before, between, behind = around(fast.encode("a", "a"))
        if not self.bos_ids:
            self.bos_ids = bos = _bos_asked_for(fast, self.config)
            before, between = (*bos, *before), (*between, *bos)
        self._around_pair = before, between, behind
        spec = without_vocabulary(fast)
        decoder = spec["decoder"]
        if may_have_dummy(fast):
            spec = json.loads(fast.to_str())
        self._dummy = remove_dummy_prefix(spec)
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
        self._splits_at_spaces = fast.pre_tokenizer is None and never_crosses_space(
            spec, fast.get_vocab(with_added_tokens=False)
        )
        # With a dummy prefix per word, text behind a border would get a prefix within a word.
        self._splits = fast.pre_tokenizer is not None and self._dummy.where != "words"
        self._made_of_text = frozenset(
            token.id
            for token in self.added.values()
            if token.special
            and len(token.content) > 1
            and fast.model.token_to_id(token.content) is not None
        )
        """Special tokens that the model's own vocabulary also has: some models produce their ids
        from any text spelled so."""
        self._special_has_break = any(
            _BREAKING.search(self.added[token].content) for token in self._made_of_text
        )

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token. Reads every token, so only at the first use. Reads them
        one by one, since a call for the whole vocabulary would hold other threads up."""
        each = (self.content(token_id) for token_id in range(self.vocab_size))
        lengths = [len(content) for content in each if content is not None]
        if len(lengths) < self.vocab_size:  # there are gaps between the ids
            lengths = list(map(len, self.fast.get_vocab()))
        return max(lengths, default=1)

    @classmethod
    def read(cls, source: ModelSource) -> Tokenizer:
        """Read a model's tokenizer. Raises InvalidRequest where none can be read."""
        text = source.tokenizer_json()
        try:
            fast = FastTokenizer.from_str(text)
            _check_numbers(fast, text)
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequest(f"{source.path}: tokenizer.json: {error}") from error
        return cls(fast, source.tokenizer_config())

    # ------------------------------------------------------------ whole texts

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a whole text; special tokens in it are recognised."""
        return self.encode_pieces((Piece(text, special=True),), begin=add_special_tokens)

    def encode_pair(self, text: str, other: str) -> list[int]:
        """Return the ids of two texts as the post-processor joins them, for models trained on
        pairs. No special tokens are recognised in them. Raises InvalidRequest as `encode` does."""
        before, between, behind = self._around_pair
        first, second = (self.encode_pieces((Piece(one, special=False),)) for one in (text, other))
        return [*before, *first, *between, *second, *behind]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(token_ids) + detokenizer.flush()

    # ------------------------------------------------------------ pieces of a branch

    def encode_pieces(
        self, pieces: Sequence[Piece], previous: int | None = None, begin: bool = False
    ) -> list[int]:
        """Return the ids of the pieces as if they had been one string, after a token `previous`.

        `previous=None` means the start of a sequence; with `begin` it begins as the post-processor
        would have it (BOS). Raises InvalidRequest for text that is not valid Unicode.
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
        """Return the ids that no later text can change, and the pieces that stay pending.

        Later text behind the pending pieces gives the ids that the joined string would have given.
        The stable part ends at the last border of two pre-tokens that lies at a complete break
        between words (`_BREAK`). Pre-tokenizers look ahead within a word or a run of white space,
        never past it. A tokenizer without a pre-tokenizer is split at spaces if none of its tokens
        has an inner space: no merge can cross a space then. Otherwise only added tokens are
        borders.
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
            return [], tuple(joined.cut(0))
        return ids, joined.cut(done)

    # ------------------------------------------------------------ single tokens

    def token_text(self, token_id: int) -> str:
        """Return one token's own text; U+FFFD for a part of a character, "" for an unknown id."""
        if self.token_bytes.kind == "other":
            return self.fast.decode([token_id], skip_special_tokens=False)
        return self.token_bytes[token_id].decode("utf-8", "replace")

    # ------------------------------------------------------------ parts of it

    def _atoms(self, joined: Joined) -> list[_Atom]:
        """Find added tokens in the text, leftmost, longest; special ones in special runs only."""
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
        """Return the place of a tail that may grow into an added token; len(text) without one."""
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
        """Return the dummy prefix that the original tokenizer would put before `text`."""
        dummy = self._dummy
        if dummy.where in ("never", "words") or not text:
            return ""
        if text[0] in (" ", SPACE) and not dummy.even_before_space:
            return ""
        if after is None:
            return " " if first else ""
        # After an added token the library tokenizes afresh; after any other token we continue.
        return " " if dummy.where == "always" and after in self.added else ""

    def _ordinary(self, text: str, after: int | None, first: bool) -> list[int]:
        """Return the ids of text in which no special token is recognised."""
        if not text:
            return []
        encoding, shift = self._encode_text(text, after, first)
        ids = encoding.ids
        if self._made_of_text.isdisjoint(ids) or not (cuts := self._cuts(text, encoding, shift)):
            return ids
        return self._parts(text, cuts, self._prefix(text, after, first))

    def _cuts(self, text: str, encoding: Encoding, shift: int) -> list[int]:
        """Find the places at which to cut `text` so that no part becomes a special token."""
        cuts = self._spelt_special(text, encoding, shift)
        more = {*cuts}
        while more:
            # Text behind a cut may spell another special token, which began before the cut.
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
        """Find the places behind the first characters of special tokens that `text` only spells."""
        if self._made_of_text.isdisjoint(encoding.ids):
            return []
        cuts = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._made_of_text:
                # An unknown text may give a special token, too, without spelling it.
                spelt = text[max(start - shift, 0) : end - shift].casefold()
                content = self.added[token].content.casefold()
                if (at := spelt.find(content)) >= 0:
                    cuts.append(max(start - shift, 0) + at + 1)
        return cuts

    def _encode_text(self, text: str, after: int | None, first: bool) -> tuple[Encoding, int]:
        """Return the library's encoding, and the length of the dummy prefix in it."""
        prefix = self._prefix(text, after, first) if self._dummy.where != "never" else ""
        try:
            # Only the batch call releases the interpreter's lock.
            encoding = self.fast.encode_batch([prefix + text], add_special_tokens=False)[0]
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(f"text cannot be tokenized: {error}") from error
        return encoding, len(prefix)

    def _stable_text(self, text: str, after: int | None, first: bool) -> tuple[list[int], int]:
        """Return the ids of the stable part of `text`, and the part's length in characters."""
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
        """Give (tokens before, character) of each border of two pre-tokens at one of `breaks`, last
        first. `shift` is the length of the dummy prefix before `text`."""
        offsets, words = encoding.offsets, encoding.word_ids
        for i in range(len(offsets) - 1, 0, -1):
            at = offsets[i][0] - shift
            border = words[i] != words[i - 1] if self._splits else text[at] == " "
            if border and at in breaks and offsets[i - 1][1] - shift <= at:
                yield i, at

    def _stable_parts(
        self, text: str, cuts: list[int], borders: list[int], prefix: str
    ) -> tuple[list[int], int]:
        """Return `_stable_text` for text that spells special tokens. The stable part ends at the
        last of `borders` (ascending) that is also one of the part between two cuts. No later text
        moves the cuts before a border, since cuts follow from tokens."""
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
                    continue  # the library would take text behind it for a new text
                before = self._parts(text[:begin], cuts[: number - 1], prefix) if number else []
                return before + encoding.ids[:count], begin + at
        return [], 0

    def _parts(self, text: str, cuts: list[int], prefix: str) -> list[int]:
        """Return the ids of the parts between cuts, each part tokenized by itself."""
        parts = self._encode_parts(text, cuts, prefix)
        return [token for _, found in parts for token in found.ids]

    def _encode_parts(self, text: str, cuts: list[int], prefix: str) -> list[tuple[str, Encoding]]:
        parts = [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]
        texts = [prefix + parts[0], *parts[1:]]
        encodings = self.fast.encode_batch(texts, add_special_tokens=False)
        return [*zip(parts, encodings, strict=True)]


def _matcher(tokens: Any) -> re.Pattern[str] | None:
    contents = sorted((t.content for t in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents))) if contents else None


def _proper_prefixes(tokens: Any) -> frozenset[str]:
    return frozenset(t.content[:n] for t in tokens for n in range(1, len(t.content)))


def _stands_alone(text: str, start: int, end: int) -> bool:
    def is_word(char: str) -> bool:
        return char.isalnum() or char == "_"

    return not (start and is_word(text[start - 1])) and not (end < len(text) and is_word(text[end]))


# Detokenizer --------------------------------------------------------------------------------------
#
# Most tokenizers are byte-faithful: each token stands for a fixed string of bytes (byte-level BPE,
# or SentencePiece with byte fallback). Decoding is then concatenation followed by UTF-8, which an
# incremental decoder does in O(new tokens). The library decodes the others over a short window.


_CONTEXT_TOKENS = 8
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decoder of a growing token sequence: text of the tokens fed so far, behind `context`.

    `context` holds the ids before: the last few may hold the beginning of a character. A tokenizer
    that strips a text's first space does so only if no token of `context` is visible. All results
    of `feed` and `flush` together are the text of the fed ids; bytes that are not UTF-8 show as
    U+FFFD.
    """

    def __init__(
        self, vocabulary: Vocabulary, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        table = vocabulary.visible_bytes if skip_special_tokens else vocabulary.token_bytes
        self._bytes = table
        self._strip = table.strips_first and not table.shows_any(context)
        self._held = b""
        """Bytes of an unfinished character."""
        self._window = _Window(vocabulary, skip_special_tokens) if table.kind == "other" else None
        if self._window is not None:
            self._window.feed(list(context[-_CONTEXT_TOKENS:]))
        else:
            # Where the last byte is not ASCII, the tokens may end within a character.
            data = b"".join(map(table.__getitem__, context[-_CONTEXT_TOKENS:]))
            if data and data[-1] >= 0x80:
                self._held = data[codecs.utf_8_decode(data, "replace", False)[1] :]

    @property
    def clean(self) -> bool:
        """Return whether no part of a character is held back."""
        if self._window is not None:
            return not self._window.holds
        return not self._held

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the new text that later tokens cannot change."""
        if self._window is not None:
            return self._window.feed(token_ids)
        if len(token_ids) == 1:
            data = self._bytes[token_ids[0]]
        else:
            data = b"".join(map(self._bytes.__getitem__, token_ids))
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        # This equals codecs' incremental decoder without its Python overhead.
        if self._held:
            data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        """Return the text held back at the end: U+FFFD for an unfinished character."""
        if self._window is not None:
            return self._window.flush()
        held, self._held = self._held, b""
        return codecs.utf_8_decode(held, "replace", True)[0]


class _Window:
    """Window of tokens decoded by the library: new text is what the window gains by new tokens.

    The window starts where the text was last whole, so a call's cost does not grow with the
    sequence.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._fast = vocabulary.fast
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._returned = 0  # tokens of the window whose text was returned
        self.holds = False

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(self._feed_one(token_id) for token_id in token_ids)

    def _feed_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        new = self._new_text()
        self.holds = new.endswith(_REPLACEMENT) and len(self._ids) - self._returned < 8
        if self.holds:
            return ""
        self._ids = self._ids[-_CONTEXT_TOKENS:]
        self._returned = len(self._ids)
        return new

    def flush(self) -> str:
        new = self._new_text() if self.holds else ""
        self._returned, self.holds = len(self._ids), False
        return new

    def _new_text(self) -> str:
        before = self._fast.decode(self._ids[: self._returned], skip_special_tokens=self._skip)
        whole = self._fast.decode(self._ids, skip_special_tokens=self._skip)
        return whole[len(before) :]
