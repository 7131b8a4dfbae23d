"""The guide to long tasks, executed as a newcomer would. The model behind the URL is a script."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_init import shell
from tests.test_repo import ROOT

NOTE = "README.md says that the function belongs into main.py. What remains: write it."


def call(command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


class Script(BaseHTTPRequestHandler):
    """Reads, sums up when it is asked to, writes the solution in the context that follows."""

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "any", "max_model_len": 8192}]})

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        task = next(message for message in messages if message["role"] == "user")
        begins, summed = task is messages[-1], NOTE in str(task["content"])
        if "Please summarise" in str(messages[-1]["content"]):
            message: dict[str, Any] = {"role": "assistant", "content": NOTE}
        elif not summed:
            message = call("cat README.md")
        elif begins:
            message = call("printf 'def f(x):\\n    return x + 3\\n' > main.py")
        else:
            message = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        used = 60 if begins and not summed else 25
        self._reply({"choices": [choice], "usage": {"completion_tokens": 5, "total_tokens": used}})

    def _reply(self, tree: Any) -> None:
        body = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def blocks() -> Iterator[list[str]]:
    found = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "guides" / "long-tasks.md").read_text(), re.S)
    assert len(found) == 2, "a new block must be executed too"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [block.replace("http://127.0.0.1:8000/v1", f"http://127.0.0.1:{server.server_port}/v1") for block in found]
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_guide_to_long_tasks_works_word_by_word(blocks: list[str], tmp_path: Path) -> None:
    printed = shell("\n".join(blocks), tmp_path)
    assert "[harness.summaries]" in printed and "Please summarise" in printed, "the dry run shows the settings"
    assert "This is your summary number 1:" in printed and NOTE in printed, printed[-2000:]
    assert "ended: done after 4 turns, 3 tool calls" in printed and "solved" in printed, printed[-2000:]
