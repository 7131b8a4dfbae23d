"""A real S3 server in its own process: moto over HTTP/1.1. It prints its address, and ends when its input closes.

python -m tests.storage.s3_server
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class Atomic:
    """S3 decides between two conditional writes atomically. moto checks first and writes later, so they take turns."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._turn = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self._app(environ, start_response)
        with self._turn:
            return self._app(environ, start_response)


class KeepAlive(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # a real store has a machine of its own, and does not wait for a core
        os.nice(-10)
    app = Atomic(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=KeepAlive)
    print(f"http://127.0.0.1:{server.port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)
