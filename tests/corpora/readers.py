"""What reads bytes that strangers send, each as a function: it returns, or raises what it may.

`tests/corpora/NAME/` holds the inputs that `tests/test_corpora.py` replays and from which
`scripts/fuzz.py` (`make fuzz`) goes on.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.gguf.file import GgufFile
from rootlace.runtime.server.programs import _decode, _split
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.compiler import check_size
from rootlace.runtime.structured.sandbox import is_suspicious
from rootlace.runtime.structured.sandbox_child import compiled
from rootlace.wire import protocol
from rootlace.wire.errors import RootlaceError
from rootlace.wire.protocol import Constraint
from tests.corpora.posted import posted

FOLDER = Path(__file__).parent
LIMITS = ConstraintConfig(max_source_bytes=1 << 16)


def read_frame(data: bytes) -> None:
    """A program's frame, as the gateway takes it, and a gateway's, as the program does."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        protocol.decode_events(data)
    for raw in _split(data):
        _decode(raw)


def read_body(data: bytes) -> None:
    """The body of a request over HTTP, down to the engine's requests and back."""
    posted().post(data)


def read_constraint(kind: str, data: bytes) -> None:
    """A constraint, up to its first mask. What looks costly is compiled in a process that is
    bounded, and is left out here."""
    constraint = Constraint(kind, data.decode("utf-8", "replace"))  # type: ignore[arg-type]
    check_size(constraint, LIMITS)
    if is_suspicious(constraint):
        return
    compiled(_compiler().build, constraint, LIMITS)


def read_gguf(data: bytes) -> None:
    """The beginning of a GGUF file: metadata, and where tensors are."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(data)
        file = GgufFile.read(path)
        assert all(len(tensor.data) <= len(data) for tensor in file.tensors.values())
        for value in file.metadata.values():
            assert not hasattr(value, "tolist") or len(value.tolist()) <= len(data)


def read_safetensors(data: bytes) -> None:
    """A file of weights, and each tensor that it says it has."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(data)
        checkpoint = Checkpoint(Path(folder))
        for name in checkpoint.types:
            tensor = checkpoint.tensor(name)
            assert tensor.numel() * tensor.itemsize <= len(data)


READERS: dict[str, Callable[[bytes], None]] = {
    "wire": read_frame,
    "http": read_body,
    "schema": functools.partial(read_constraint, "json_schema"),
    "regex": functools.partial(read_constraint, "regex"),
    "grammar": functools.partial(read_constraint, "ebnf"),
    "tag": functools.partial(read_constraint, "structural_tag"),
    "safetensors": read_safetensors,
    "gguf": read_gguf,
}


def attempt(name: str, data: bytes) -> None:
    """Read it. Any exception that is no typed error is a fault of ours."""
    try:
        READERS[name](data)
    except RootlaceError as error:
        assert str(error)


def inputs(name: str) -> list[Path]:
    return sorted((FOLDER / name).iterdir())


@functools.cache
def _compiler() -> GrammarCompiler:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return GrammarCompiler(tokenizer, eos_token_ids=[0], config=LIMITS)
