"""A hub on this machine: the routes that huggingface_hub asks, over folders with models. Nothing leaves the machine."""

import json
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants, get_local_safetensors_metadata, hf_api

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"


class HubStandIn:
    """repositories: {name: folder}. `asked` lists the paths of all requests. While `flows` is clear, weights stop half
    way.
    """

    def __init__(self, repositories: dict[str, Path]):
        self.repositories, self.asked, self.flows = repositories, [], Event()
        self.flows.set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def describe(self, name: str) -> dict:
        """What the hub's API says about a model, as far as it is read here."""
        folder = self.repositories[name]
        files = [{"rfilename": path.name, "size": path.stat().st_size} for path in sorted(folder.iterdir())]
        counts: dict[str, int] = {}
        for file in get_local_safetensors_metadata(folder).files_metadata.values():
            for dtype, count in file.parameter_count.items():
                counts[dtype] = counts.get(dtype, 0) + count
        weights = {"parameters": counts, "total": sum(counts.values())}
        return {"id": name, "sha": COMMIT, "siblings": files, "safetensors": weights, "private": False, "tags": []}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self, body: bool = True) -> None:
                path = unquote(urlsplit(self.path).path)
                if path != "/api/agent-harnesses":  # what the client wants to know about itself
                    hub.asked.append(path)
                name, _, file = path.removeprefix("/api/models/").strip("/").partition("/resolve/")
                if name not in hub.repositories:
                    return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
                if not file:
                    return self.answer(200, json.dumps(hub.describe(name)).encode(), {}, body)
                place = hub.repositories[name] / file.partition("/")[2]
                if not place.exists():
                    return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                data = place.read_bytes()
                tag = {"ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                self.answer(200, data, tag, body, place.name == WEIGHTS and "range" not in self.headers)

            def do_HEAD(self) -> None:
                self.do_GET(body=False)

            def answer(self, code: int, data: bytes, headers: dict, body: bool, is_held: bool = False) -> None:
                self.send_response(code)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                half = len(data) // 2 if is_held else len(data)
                if body:
                    self.wfile.write(data[:half])
                    self.wfile.flush()
                    hub.flows.wait(60) if is_held else None
                    self.wfile.write(data[half:])

            def log_message(self, *given: object) -> None:
                pass

        return Handler


@contextmanager
def hub_standin(patch, cache: Path, repositories: dict[str, Path]):
    """huggingface_hub asks the stand-in in this process, with an empty cache; yields the HubStandIn."""
    hub = HubStandIn(repositories)
    patch.setattr(constants, "ENDPOINT", hub.address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(hf_api.api, "endpoint", hub.address)  # made when it was imported
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)  # toys are smaller than the usual part
    Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.flows.set()
        hub.server.shutdown()
        hub.server.server_close()
