"""gs://, in a folder of this machine: for etils, which opens files, and as the server that TensorStore asks."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from etils.epath import backend, gpath
from orbax.checkpoint._src.path import gcs_utils


class Handler(BaseHTTPRequestHandler):
    """The part of the JSON interface of Google Cloud Storage that reads, writes, lists and deletes objects."""

    def _object(self):
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        bucket, _, name = address.path.partition("/b/")[2].partition("/o")
        return self.server.root / unquote(bucket), query.get("name") or unquote(name[1:]), query

    def _answer(self, status, content=b"", generation=1, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("x-goog-generation", str(generation))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        bucket, name, query = self._object()
        path = bucket / name
        if not name:
            names = sorted(each.relative_to(bucket).as_posix() for each in bucket.rglob("*") if each.is_file())
            found = [each for each in names if each.startswith(query.get("prefix", ""))]
            found = [each for each in found if query.get("startOffset", "") <= each < query.get("endOffset", "\x7f")]
            self._answer(200, json.dumps({"items": [{"name": each, "size": "1"} for each in found]}).encode())
        elif not path.is_file():
            self._answer(404)
        else:
            content, generation = path.read_bytes(), path.stat().st_mtime_ns
            if asked := self.headers.get("Range"):
                first, last = asked.removeprefix("bytes=").split("-")
                start = int(first) if first else max(len(content) - int(last), 0)
                part = content[start : int(last) + 1 if first and last else None]
                span = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
                self._answer(206, part, generation, Content_Range=span)
            else:
                self._answer(200, content, generation)

    def do_POST(self):
        bucket, name, query = self._object()
        path, content = bucket / name, self.rfile.read(int(self.headers["Content-Length"]))
        now = path.stat().st_mtime_ns if path.is_file() else 0
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != now:
            self._answer(412)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        said = {"name": name, "size": str(len(content)), "generation": str(path.stat().st_mtime_ns)}
        self._answer(200, json.dumps(said).encode())

    def do_DELETE(self):
        bucket, name, _ = self._object()
        (bucket / name).unlink(missing_ok=True)
        self._answer(204)

    def log_message(self, *_):
        pass


class Backend:
    """Opens files of gs:// in the folder."""

    def __init__(self, root):
        self.root = root

    def _there(self, given):
        text = str(given)
        return str(self.root / text.removeprefix("gs://")) if text.startswith("gs://") else given

    def __getattr__(self, name):
        def call(*arguments, **options):
            found = getattr(backend.os_backend, name)(*map(self._there, arguments), **options)
            return [each.replace(f"{self.root}/", "gs://") for each in found] if name == "glob" else found

        return call


def start(root, monkeypatch):
    """Serves buckets from subfolders of a folder until the test ends."""
    server = ThreadingHTTPServer(("localhost", 0), Handler)
    server.root = root
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://localhost:{server.server_port}")
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda _: False)  # it asks Google's package
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", Backend(root))
    return server
