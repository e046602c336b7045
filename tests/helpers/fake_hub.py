"""A local server that answers like the Hugging Face Hub, for `huggingface_hub` and `datasets`."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT, OLD_COMMIT = "a" * 40, "b" * 40


class FakeHub(BaseHTTPRequestHandler):
    """The routes of the Hub that `snapshot_download` and `load_dataset` use: the files in `folder` are the model org/tiny, or the
    data set org/set."""

    folder: Path
    fetched: list[str]
    needs_token = False
    head = COMMIT  # of the branch main

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if self.needs_token and self.headers.get("Authorization") != "Bearer hf_right":
            return self.reply(b"{}", {"X-Error-Code": "GatedRepo"}, status=403, with_body=with_body)
        match parts:
            case ["api", "models" | "datasets", "org", "tiny" | "set" as name, *route]:
                if route[:1] == ["tree"]:
                    files = [
                        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": self.etag(path)}
                        for path in self.folder.iterdir()
                    ]
                    return self.reply(json.dumps(files if len(route) == 2 else []).encode(), {}, with_body=with_body)
                revision = route[1] if route else "main"
                if revision not in ("main", "v1", COMMIT):
                    return self.reply(b"{}", {"X-Error-Code": "RevisionNotFound"}, status=404, with_body=with_body)
                siblings = [{"rfilename": path.name} for path in self.folder.iterdir()]
                info = {"id": f"org/{name}", "sha": OLD_COMMIT if revision == "v1" else self.head, "siblings": siblings}
                return self.reply(json.dumps(info).encode(), {}, with_body=with_body)
            case [*_, "org", "tiny" | "set", "resolve", revision, file]:
                path = self.folder / file
                if not path.is_file():
                    return self.reply(b"{}", {"X-Error-Code": "EntryNotFound"}, status=404, with_body=with_body)
                if with_body:
                    self.fetched.append(file)
                headers = {"ETag": f'"{self.etag(path)}"', "X-Repo-Commit": revision}
                return self.reply(path.read_bytes(), headers, with_body=with_body)
        return self.reply(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404, with_body=with_body)

    def etag(self, path: Path) -> str:
        return hashlib.sha1(path.read_bytes()).hexdigest()

    def reply(self, body: bytes, headers: dict[str, str], *, status: int = 200, with_body: bool) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def fake_hub(folder: Path) -> Iterator[tuple[str, type[FakeHub]]]:
    """Serve the files in a folder. Yields the URL and the class of the handler, whose attributes can be set."""
    handler = type("Handler", (FakeHub,), {"folder": folder, "fetched": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()
