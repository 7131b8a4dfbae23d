"""The guide to an agent of one's own, executed as a newcomer would, and the example that trains an agent from PyPI."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.test_init import shell
from tests.test_repo import ROOT

GUIDE = ROOT / "docs" / "guides" / "your-own-agent.md"


class Endpoint(BaseHTTPRequestHandler):
    """A model that always gives the same answer."""

    answer = "def f(x):\n    return x + 3\n"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": self.answer}
        body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str) -> list[str]:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 5
    return [block.replace("http://127.0.0.1:8000/v1", endpoint) for block in blocks]


def test_the_guide_to_an_agent_works_word_by_word(blocks: list[str], tmp_path: Path) -> None:
    printed = shell("\n".join(blocks[:4]), tmp_path)
    assert "my-agent@" in printed and "10 of 10 tasks are all right" in printed and 'kind = "command"' in printed
    assert "ended: done after 1 turns" in printed and "return x + 3" in printed and "solved" in printed, printed[-2000:]


@pytest.mark.slow
def test_the_guides_last_step_trains_the_model_behind_the_agent(blocks: list[str], tmp_path: Path) -> None:
    printed = shell("\n".join([*blocks[:3], blocks[4]]), tmp_path)
    assert printed.count("graded") >= 8, printed[-2000:]
