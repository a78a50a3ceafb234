"""A small server of the OpenAI completions interface, for tests: it answers with what a test gives it."""
from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass
class Answer:
    """What the server sends: a status, parts of a body, and whether it then breaks off or falls silent."""

    parts: Iterable[bytes] = ()
    status: int = 200
    kind: str = "text/event-stream"
    breaks: bool = False
    silent: threading.Event | None = None


@dataclass
class CompletionServer:
    """Answers the n-th request with the n-th answer, the last one again and again."""

    answers: list[Answer]
    requests: list[dict[str, Any]] = field(default_factory=list)  # path, headers and body of each
    address: str = ""

    @contextmanager
    def running(self) -> Iterator[CompletionServer]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.requests.append({"path": self.path, "headers": dict(self.headers), "body": body})
                answer = owner.answers[min(len(owner.requests), len(owner.answers)) - 1]
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.kind)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    self._send(answer)
                except OSError:  # the client has left
                    self.close_connection = True

            def _send(self, answer: Answer) -> None:
                for part in answer.parts:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()
                if answer.silent:
                    answer.silent.wait(30)
                self.close_connection = True
                if not answer.breaks:
                    self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str, logprob: float | None = None, finish: str | None = None, **rest: Any) -> bytes:
    """One token in the form of vLLM and SGLang; the second candidate is always "zu"."""
    top = [{text: logprob, " zu": -3.0}]
    logprobs = None if logprob is None else {"tokens": [text], "token_logprobs": [logprob], "top_logprobs": top}
    return event(choices=[{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}], **rest)


def text(*pieces: str) -> Answer:
    """A complete answer with a log-probability for each piece."""
    last = event(choices=[{"index": 0, "text": "", "finish_reason": "stop"}], usage={"completion_tokens": len(pieces)})
    return Answer([*(piece(one, -0.5) for one in pieces), last, DONE])
