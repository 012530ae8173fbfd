"""A stand-in of the Hugging Face hub: the interface that `huggingface_hub` downloads models by."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")
"""Endings of the files whose sha256 the hub knows."""

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>.+))?")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Hub:
    """`repos`: name -> revision -> files. A commit's name is made of what its files hold."""

    url: str = ""
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    """File -> of which so many bytes are sent once, before the connection breaks."""
    status: int = 0
    """Answered to everything, where it is not 0."""
    damaged: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    """Method, path and range of each request."""

    def add(self, repo: str, files: dict[str, bytes] | Path, revision: str = "main") -> str:
        """The commit, which is a revision, too."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repos.setdefault(repo, {}).update({revision: files, commit: files})
        return commit

    def commit(self, repo: str, revision: str) -> str:
        files = self.repos[repo][revision]
        return next(
            name for name, its in self.repos[repo].items() if its == files and len(name) == 40
        )

    def sent(self, file: str) -> list[str]:
        """The requests for the contents of `file`."""
        return [one for one in self.asked if one.startswith("GET") and f"/{file} " in f"{one} "]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if self.hub.status:
            self._fail(self.hub.status, "")
            return
        api, file = _API.fullmatch(path), _FILE.fullmatch(path)
        found = api or file
        if found is None or found["repo"] not in self.hub.repos:
            self._fail(404, "RepoNotFound")
            return
        repo, revision = found["repo"], found["revision"] or "main"
        files = self.hub.repos[repo].get(revision)
        if files is None:
            self._fail(404, "RevisionNotFound")
        elif file is None:
            self._list(repo, revision, files)
        elif repo in self.hub.gated:
            self._fail(403, "GatedRepo")
        elif file["file"] not in files:
            self._fail(404, "EntryNotFound")
        else:
            self._send(repo, revision, file["file"], files[file["file"]])

    def _list(self, repo: str, revision: str, files: dict[str, bytes]) -> None:
        siblings = []
        for name, data in files.items():
            one = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if name.endswith(LARGE):
                sha256 = hashlib.sha256(data).hexdigest()
                one["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
            siblings.append(one)
        about = {"id": repo, "sha": self.hub.commit(repo, revision), "siblings": siblings}
        body = json.dumps(about).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, repo: str, revision: str, name: str, data: bytes) -> None:
        etag = hashlib.sha256(data) if name.endswith(LARGE) else hashlib.sha1(data)
        size = len(data)
        if name in self.hub.damaged:
            data = bytes(byte ^ 1 for byte in data)
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(first[1]) if first else 0
        self.send_response(206 if first else 200)
        self.send_header("X-Repo-Commit", self.hub.commit(repo, revision))
        self.send_header("ETag", f'"{etag.hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(size - start))
        if first:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        until = self.hub.cut.pop(name, size)
        self.wfile.write(data[start:until])
        if until < size:
            self.close_connection = True

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    # The end of the server waits for the next look.
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
