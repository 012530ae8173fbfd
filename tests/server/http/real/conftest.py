"""A served real served model over a fake engine."""

import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.server.http.conftest import Serve, Served
from tests.server.http.real.served import serve_real
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("http") / "tiny"))


@pytest.fixture
def reference(folder: str) -> FastTokenizer:
    return FastTokenizer.from_file(f"{folder}/tokenizer.json")


@pytest.fixture
async def real(folder: str, serve: Serve, reference: FastTokenizer) -> Served:
    return await serve_real(folder, serve, reference)
