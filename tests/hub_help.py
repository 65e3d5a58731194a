"""A small server that speaks as much of the Hugging Face Hub as its library needs to push and pull."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_test"


class Repository:
    def __init__(self, private: bool = False) -> None:
        self.private = private
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.tags: dict[str, str] = {}

    def commit(self, files: dict[str, bytes]) -> str:
        whole = {**(self.commits[-1][1] if self.commits else {}), **files}
        oid = hashlib.sha1(repr(sorted(whole.items())).encode()).hexdigest()
        self.commits.append((oid, whole))
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main" and self.commits:
            return self.commits[-1]
        wanted = self.tags.get(revision, revision)
        return next((commit for commit in self.commits if commit[0] == wanted), None)


class Hub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}  # large files by checksum
        self.url = ""


@contextmanager
def local_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, content: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def error(self, status: int, code: str) -> None:
            self.answer({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

        def may_write(self) -> bool:
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                return True
            self.answer({"error": "Invalid username or password."}, 401)
            return False

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(refs|tree/([^/]+))", path):
                repository = hub.repositories.get(found[1])
                if repository is None:
                    self.error(404, "RepoNotFound")
                elif found[2] == "refs":
                    tags = [
                        {"name": name, "ref": f"refs/tags/{name}", "targetCommit": oid}
                        for name, oid in repository.tags.items()
                    ]
                    self.answer({"branches": [], "converts": [], "tags": tags})
                else:
                    commit = repository.at(found[3])
                    files = commit[1] if commit else {}
                    listed = [(name, len(data)) for name, data in files.items()]
                    self.answer([{"type": "file", "path": name, "oid": "0" * 40, "size": n} for name, n in listed])
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                repository = hub.repositories.get(found[1])
                if repository is None or (repository.private and not self.headers.get("Authorization")):
                    return self.error(404 if self.headers.get("Authorization") else 401, "RepoNotFound")
                commit = repository.at(found[2])
                if commit is None:
                    return self.error(404, "RevisionNotFound")
                if found[3] not in commit[1]:
                    return self.error(404, "EntryNotFound")
                data = commit[1][found[3]]
                etag = hashlib.sha256(data).hexdigest()
                self.answer(data, headers={"ETag": f'"{etag}"', "X-Repo-Commit": commit[0]})
            else:
                self.answer({"error": f"no {path}"}, 404)

        def do_PUT(self) -> None:
            data = self.body()
            hub.stored[hashlib.sha256(data).hexdigest()] = data
            self.answer({})

        def do_POST(self) -> None:
            path, body = self.path.partition("?")[0], self.body()
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if not self.may_write():
                return
            if path == "/api/repos/create":
                given = json.loads(body)
                name = f"{given['organization']}/{given['name']}"
                if name in hub.repositories:
                    return self.answer({"error": "exists", "url": f"{hub.url}/{name}"}, 409)
                if given["organization"] == "other":
                    return self.answer({"error": "You have no rights there"}, 403)
                hub.repositories[name] = Repository(bool(given.get("private")) or given.get("visibility") == "private")
                return self.answer({"url": f"{hub.url}/{name}", "name": name})
            found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+?)(?:\.git)?/(preupload|commit|tag|info)/(.*)", path)
            repository = hub.repositories.get(found[1]) if found else None
            if found is None or repository is None:
                return self.error(404, "RepoNotFound")
            if found[2] == "preupload":
                modes = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                        "shouldIgnore": False,
                        "oid": None,
                    }
                    for file in json.loads(body)["files"]
                ]
                return self.answer({"files": modes})
            if found[2] == "info":
                objects = [
                    {**one, "actions": {"upload": {"href": f"{hub.url}/upload/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                return self.answer({"transfer": "basic", "objects": objects})
            if found[2] == "tag":
                repository.tags[json.loads(body)["tag"]] = found[3]
                return self.answer({})
            files = {}
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    files[entry["value"]["path"]] = hub.stored[entry["value"]["oid"]]
            oid = repository.commit(files)
            self.answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{found[1]}/commit/{oid}"})

    return Handler
