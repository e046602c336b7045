"""A stand-in for the HTTP API of the Hugging Face Hub: repositories, commits with inline files, downloads."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token_of_the_test"
SHA = "0" * 40


class HubServer(ThreadingHTTPServer):
    """repos: (type, id) -> {path: content}. private: ids created as private. The server accepts TOKEN only."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[tuple[str, str], dict[str, bytes]] = {}
        self.private: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": SHA, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.answer({"error": "Invalid username or password."}, 401)
        return False

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers["Content-Length"]))
        if not self.allowed():
            return
        if path == "/api/repos/create":
            asked = json.loads(body)
            kind, name = asked.get("type") or "model", asked["name"]
            name = f"{asked['organization']}/{name}" if asked.get("organization") else name
            if (kind, name) in self.server.repos:
                return self.answer({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
            self.server.repos[kind, name] = {}
            if asked.get("private") or asked.get("visibility") == "private":
                self.server.private.add(name)
            return self.answer({"url": f"{self.server.url}/{'datasets/' * (kind == 'dataset')}{name}", "id": name})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        found = re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if found is None:
            return self.answer({"error": f"no such endpoint: {path}"}, 404)
        kind, name, action = found.groups()
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        for line in body.splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                self.server.repos[kind, name][part["value"]["path"]] = base64.b64decode(part["value"]["content"])
        return self.answer({"commitUrl": f"{self.server.url}/{name}/commit/{SHA}", "commitOid": SHA, "success": True})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if not self.allowed():
            return
        if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(/revision/[^/]+|/tree/.+)?", path):
            kind, name, rest = found.groups()
            files = self.server.repos.get((kind, name))
            if files is None:
                return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            if rest and rest.startswith("/tree/"):
                return self.answer(
                    [{"type": "file", "path": p, "size": len(c), "oid": _oid(c)} for p, c in files.items()]
                )
            siblings = [{"rfilename": file} for file in files]
            return self.answer(
                {"id": name, "sha": SHA, "siblings": siblings, "private": True, "tags": [], "downloads": 0}
            )
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            kind, name, file = "dataset" if found[1] else "model", found[2], found[3]
            content = self.server.repos.get((kind, name), {}).get(file)
            if content is None:
                return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return self.answer(content, ETag=f'"{_oid(content)}"')
        self.answer({"error": f"no such endpoint: {path}"}, 404)
        return None

    do_HEAD = do_GET


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
