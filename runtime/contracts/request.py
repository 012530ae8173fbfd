"""What is asked of the engine: one sequence to complete."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Annotated, Literal

import msgspec
import numpy as np

from rootlace.wire.cache_report import Scope
from rootlace.wire.handling import PLAIN, Handling
from rootlace.wire.protocol import Constraint, SamplingParams

NO_TOKENS = np.empty(0, np.int32)

Pooling = Literal["none", "last", "mean", "labels"]
"""What a request asks for in place of tokens: the final hidden state of its last token, the mean of
those of all tokens, or the scores that a classifier's head gives the last one."""


def kv_namespace(namespace: str, adapter: str) -> Hashable:
    """Whose KV a request may share: that of its tenant's requests with the same adapter."""
    return (adapter, namespace) if adapter else namespace


def adapter_and_namespace(kv: Hashable) -> tuple[str, str]:
    """Of what `kv_namespace` gave, adapter and namespace."""
    return kv if isinstance(kv, tuple) else ("", str(kv or ""))


def kv_space(kv: Hashable, contents: Mapping[str, bytes] | None = None) -> bytes:
    """32 bytes that are others for every namespace and every content of an adapter, of which
    `contents` has digests, 32 bytes each, by name; one that is not there counts by its name."""
    adapter, namespace = adapter_and_namespace(kv)
    # Lengths are fixed, so no two pairs are written alike.
    named = hashlib.blake2b(adapter.encode(), digest_size=32).digest() if adapter else bytes(32)
    content = (contents or {}).get(adapter, named)
    return hashlib.blake2b(content + namespace.encode(), digest_size=32).digest()


def pin_id(kv: Hashable, token_ids: np.ndarray) -> str:
    """The id of a pin: the same for the same tokens (int32) of the same KV."""
    digest = hashlib.blake2b(ascii(kv).encode() + b"\0", digest_size=8)
    digest.update(token_ids.astype("<i4").tobytes())
    return digest.hexdigest()


class ThoughtTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """`protocol.Thoughts` as token ids; `special`: `begin` and `end` are found as these tokens, and
    not as their text. `stops` end no text within."""

    end: tuple[int, ...]
    begin: tuple[int, ...] = ()
    gap: tuple[int, ...] = ()
    then: tuple[int, ...] = ()
    close: tuple[int, ...] = ()
    budget: int | None = None
    stops: tuple[int, ...] = ()
    special: bool = False


class Request(msgspec.Struct, frozen=True, omit_defaults=True, eq=False, tag="submit"):
    """One sequence to complete: the gateway makes it, the engine is sent it, the scheduler runs it.

    `token_ids` is the prompt, `output_ids` what another engine already generated for it (both
    int32); the latter counts toward `max_tokens`. In `params`, `n` is 1, `seed` is set,
    `max_tokens` is a number (0: only compute the prompt), and `stop_token_ids` holds every id that
    ends the request (EOS included unless ignored). Stop strings are the gateway's business.

    With `report`, the first update says why so much of the prompt was cached, and no more: as far
    as its `own` namespace shows it, or with a look into `all`.

    The first token is emitted at once, then at least `emit_every` at a time, at most once in
    `emit_seconds`, and at the end whatever is left: where nobody waits for single tokens, they need
    not cost a message each.

    All tokens are computed with the `adapter` of this name ("": without one), and share KV with
    those of requests with the same one alone.

    With a `pooling` it is over when its prompt is computed (`max_tokens` is 0), and its last update
    has the `vector`.

    One that is `suspected` was in a step in which another engine died: it is computed alone until
    what is given is, and its first `suspected` tokens are. One that is `resumed` was another
    engine's: it was admitted there, and is not refused because many wait.

    `handling` is as the client gave it, but for `cache.share`, which the `namespace` says.

    `client` is whose turn it takes among those who wait: the name of an API key, or where the
    request came from. It may have `max_pins` (None: as many as there is room for).

    `prediction` (int32) is what the client expects of the output: it may come faster for it, and is
    no other. `thoughts` come before the answer: the constraint holds behind them.
    """

    rid: int
    token_ids: np.ndarray
    params: SamplingParams
    output_ids: np.ndarray = NO_TOKENS
    constraint: Constraint | None = None
    namespace: str = ""
    program: str = ""
    adapter: str = ""
    emit_every: Annotated[int, msgspec.Meta(ge=1)] = 1
    emit_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    pooling: Pooling = "none"
    report: Scope | Literal[""] = ""
    handling: Handling = PLAIN
    suspected: int = 0
    resumed: bool = False
    client: str = ""
    max_pins: int | None = None
    prediction: np.ndarray = NO_TOKENS
    thoughts: ThoughtTokens | None = None
