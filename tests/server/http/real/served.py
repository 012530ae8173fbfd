"""A real gateway over a fake engine, served, and the requests that the engine got."""

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server.model_texts import load_chat, load_eos_ids
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import Serve, Served


async def serve_real(folder: str, serve: Serve, reference: FastTokenizer, **options: str) -> Served:
    source = FolderSource(Path(folder))
    tokenizer = Tokenizer.read(source)
    end = reference.token_to_id("<|end|>")
    engine = FakeEngine(
        tokenizer.vocab_size,
        context_length=512,
        adapters=("formal", "short"),
        script=lambda message: [*reference.encode("héllo. bye").ids, end],
    )
    config = GatewayConfig(model=folder, program_address="", served_name="tiny", **options)  # type: ignore[arg-type]
    model = ServedModel(
        config,
        engine,
        tokenizer,
        load_chat(source, tokenizer),
        load_eos_ids(source, tokenizer),
    )
    return await serve(model)  # type: ignore[arg-type]


def engine_of(served: Served) -> FakeEngine:
    return served.model.engine  # type: ignore[attr-defined]


def ids_of(request: EngineRequest) -> list[int]:
    return request.token_ids.tolist()
