"""A hub of our own on this machine: the few answers that huggingface_hub needs for a download."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef" * 2 + "01234567"


@dataclass
class FakeHub:
    """Repositories by name, each a table of files; `asked` has every request's method and path."""

    url: str
    repositories: Mapping[str, Mapping[str, bytes]]
    asked: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    """Serve repositories until the block ends. The name `them/gated` asks for an agreement, and
    files of `them/broken` end in the middle."""
    hub = FakeHub("", repositories)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: object) -> None:
            return

        def _answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            parts = path.strip("/").split("/")
            listing = parts[:2] == ["api", "models"]
            repo = "/".join(parts[2:4] if listing else parts[:2])
            if repo == "them/gated":
                self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
            elif repo not in repositories:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
            elif listing:
                files = [{"rfilename": name} for name in repositories[repo]]
                about = {"id": repo, "sha": COMMIT, "siblings": files}
                self._send(200, json.dumps(about).encode(), {}, with_body)
            elif (data := repositories[repo].get("/".join(parts[4:]))) is None:
                missing = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
                self._send(404, b"", missing, with_body)
            else:
                tag = hashlib.sha256(data).hexdigest()
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'}
                self._send(200, data, headers, with_body, broken=repo == "them/broken")

        def _send(
            self,
            status: int,
            body: bytes,
            headers: Mapping[str, str],
            with_body: bool,
            *,
            broken: bool = False,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body[: len(body) // 2] if broken else body)
                self.close_connection = broken

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
