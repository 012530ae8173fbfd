"""Programs' encrypted connections, and clients that do not know the key."""

import asyncio
import threading
from pathlib import Path

import pytest
import zmq

from rootlace.client.connection import Connection
from rootlace.client.endpoint import program_address
from rootlace.runtime.server.auth import public_part, read_program_key
from rootlace.runtime.server.programs import ProgramServer
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.errors import InvalidRequest, ServerUnavailable
from tests.server.conftest import make_model


def connect(address: str) -> str:
    """Return the name of the model that the server at `address` reports."""
    connection = Connection(address, connect_timeout=20)
    try:
        return connection.model.name
    finally:
        connection.close()


async def overheard(port: int, client: str) -> tuple[str, bytes]:
    """Return the model's name that `client` gets through a listener in between, and all bytes."""
    heard = bytearray()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            heard.extend(data)
            writer.write(data)
        writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    listener = await asyncio.start_server(join, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        name = await asyncio.to_thread(connect, address + client)
    return name, bytes(heard)


async def test_nobody_in_between_reads_what_is_said(stories: Tokenizer, tmp_path: Path) -> None:
    for key in ("", str(tmp_path / "program.key")):
        model, _ = make_model(stories, program_address="tcp://127.0.0.1:0", program_key=key)
        server = ProgramServer(model)
        address, _, public = server.start().partition("#")
        port = int(address.rsplit(":", 1)[1])
        try:
            name, heard = await overheard(port, f"#{public}" if key else "")
            assert name == model.model_info.name
            assert (name.encode() in heard) == (not key)
            if key:
                # A client without encryption, or with another key, gets no answer.
                other = public_part(zmq.curve_keypair()[1])
                for wrong in ("", f"#{other}"):
                    with pytest.raises(ServerUnavailable, match="encrypt with the same key"):
                        await asyncio.to_thread(connect, address + wrong)
                assert not [one for one in threading.enumerate() if address in one.name]
        finally:
            await server.stop()
            model.close()


def test_a_key_is_made_once_and_is_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "key"
    secret = read_program_key(str(path))
    assert read_program_key(str(path)) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(InvalidRequest, match="others may read"):
        read_program_key(str(path))
    path.write_bytes(b"no key")
    path.chmod(0o600)
    with pytest.raises(InvalidRequest, match="holds no secret key"):
        read_program_key(str(path))
    with pytest.raises(InvalidRequest, match="No such file"):
        read_program_key(str(tmp_path / "no" / "key"))


def test_a_key_in_an_address() -> None:
    key = public_part(zmq.curve_keypair()[1])
    assert program_address(f"tcp://host:1#{key}", "") == f"tcp://host:1#{key}"
    with pytest.raises(InvalidRequest, match="not a server's public key"):
        program_address("tcp://host:1#abc", "")
