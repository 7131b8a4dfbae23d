"""The guide to an agent of one's own, executed as a newcomer would, and the example that trains an agent from PyPI."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.test_init import shell, shortened
from tests.machines.images.test_image import make_wheel
from tests.test_repo import ROOT, example_overrides

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
    assert len(blocks) == 6
    return [block.replace("http://127.0.0.1:8000/v1", endpoint) for block in blocks]


@pytest.mark.slow
def test_the_guide_to_an_agent_works_word_by_word(blocks: list[str], tmp_path: Path) -> None:
    printed = shell("\n".join(blocks[:4]), tmp_path)
    assert "my-agent@" in printed and "32 of 32 tasks are all right" in printed and 'kind = "command"' in printed
    assert "ended: done after 1 turns" in printed and "return x + 3" in printed and "solved" in printed, printed[-2000:]


@pytest.mark.slow
def test_the_guide_to_an_agent_as_a_class(blocks: list[str], tmp_path: Path) -> None:
    printed = shell("\n".join([*blocks[:3], blocks[5]]), tmp_path)
    assert "ended: answer after 1 turns" in printed and "solved" in printed, printed[-2000:]


@pytest.mark.slow
def test_the_guides_last_step_trains_the_model_behind_the_agent(blocks: list[str], tmp_path: Path) -> None:
    printed = shell("\n".join([*blocks[:3], shortened(blocks[4])]), tmp_path)
    assert printed.count("graded") >= 8, printed[-2000:]


# Stands in for mini-swe-agent, which tests cannot download: the same command line and settings, one step.
_MINI = """
import argparse, json, os, re, subprocess, urllib.request

def main():
    parser = argparse.ArgumentParser()
    for option in ("--config", "--task", "--output"):
        parser.add_argument(option, required=True)
    given = parser.parse_args()
    assert "litellm_textbased" in open(given.config).read() and os.environ["MSWEA_CONFIGURED"] == "true"
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": [{"role": "user", "content": given.task}]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    command, = re.findall(r"```mswea_bash_command\\s*\\n(.*?)\\n```", answer, re.S)
    subprocess.run(["bash", "-c", command], check=True)
"""


@pytest.mark.slow
def test_the_example_runs_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    modules = {"mini_stand_in.py": _MINI}
    make_wheel(wheels, "mini_swe_agent", modules, "mini_stand_in:main", version="2.4.6", script="mini")
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(Endpoint, "answer", "Done.\n```mswea_bash_command\necho blue > answer.txt\n```")
    directory = tmp_path / "own_agent"
    shutil.copytree(ROOT / "examples" / "own_agent", directory)
    monkeypatch.chdir(directory)
    example_overrides(directory / "run.toml")  # the shape of its checkpoint
    commands = [line.removeprefix("#     ") for line in (directory / "run.toml").read_text().splitlines()]
    build, check = [line for line in commands if line.startswith(("rollmill images", "rollmill tasks"))]
    printed = shell(f"{build}\n{check}\nrollmill rollout run.toml --model {endpoint} --task blue", directory)
    assert "12 of 12 tasks are all right" in printed and "ended: done after 1 turns" in printed
    assert "well_formed 1" in printed and "solved 1" in printed, printed[-2000:]
