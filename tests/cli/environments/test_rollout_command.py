"""`rollmill rollout` and `rollmill eval --model` against a real HTTP server that plays a scripted model."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollmill.demo import CONFIG as DEMO
from rollmill.gateway.routing.targets import DEFAULT
from tests.cli.conftest import Told
from tests.rollouts.world import SOLUTION


class Model:
    """Answers turn N of every conversation with call N of the solution."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.broken = False
        self.door = 200  # the status of every answer, unless it is 200
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                model.keys.add(self.headers["Authorization"])
                self.reply(*model.answer(body))

            def reply(self, status: int, answer: Any) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.reply(403, {"error": {"message": "this key may not list models"}})

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append(body)
        if self.door != 200:
            return self.door, {"error": {"message": "not here"}}
        if self.broken:
            return 400, {"error": {"message": "out of order"}}
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        name, arguments = SOLUTION[turn]
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return 200, {
            "choices": [{"finish_reason": "tool_calls", "message": message}],
            "usage": {"completion_tokens": 5},
        }


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.server.shutdown()
    model.server.server_close()


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(DEMO.read_text().replace("rollmill.demo.micro_repos:MicroRepos", "tests.rollouts.world:Additions"))
    return path


Command = Callable[..., Told]


def test_one_episode_is_played_and_shown(rollmill: Command, model: Model, run_toml: Path) -> None:
    told = rollmill(
        "rollout", run_toml, "--model", model.url, "--key", "secret", "--model-name", "big", "--task", "train/0"
    )
    assert told.code == 0, told.err
    assert "task train/0" in told.out and "fix main.py" in told.out
    assert "return x + 7" in told.out and "handed in: main.py" in told.out
    assert "ended: done after 3 turns, 3 tool calls · 15 tokens" in told.out
    assert "reward #1  1" in told.out and "calls" in told.out
    assert model.keys == {"Bearer secret"} and {body["model"] for body in model.requests} == {"big"}


def test_a_wrong_answer_gets_its_evidence(rollmill: Command, model: Model, run_toml: Path) -> None:
    told = rollmill("rollout", run_toml, "--model", model.url, "--task", "train/1")
    assert told.code == 0 and "reward #1  0" in told.out and "first_wrong" in told.out
    assert {body["model"] for body in model.requests} == {DEFAULT}, "the name that `rollmill serve` knows"


def test_an_endpoint_that_fails_is_no_reward(rollmill: Command, model: Model, run_toml: Path) -> None:
    model.broken = True
    told = rollmill("rollout", run_toml, "--model", model.url)
    assert told.code == 1 and "no reward: " in told.out and "answered 400" in told.out and "out of order" in told.out
    assert rollmill("rollout", run_toml).code == 1


def test_an_endpoint_that_is_not_there_is_told_at_once(rollmill: Command, model: Model, run_toml: Path) -> None:
    model.server.shutdown()
    model.server.server_close()
    for command in ("rollout", "eval"):
        told = rollmill(command, run_toml, "--model", model.url)
        assert told.code == 1 and f"{model.url} cannot be reached" in told.err and "up to and with /v1" in told.err


@pytest.mark.parametrize("command", ["rollout", "eval"])
@pytest.mark.parametrize(
    ("status", "url", "told"),
    [
        (401, "{}", "wants a key: 401 not here\nhint: set OPENAI_API_KEY"),
        (501, "{}", "answered 501: not here\nhint: is that an OpenAI-compatible server?"),
        (404, "{}", "answered 404: not here\nhint: is that an OpenAI-compatible server?"),
        (404, "{}/chat/completions", "did you mean {}?"),
    ],
)
def test_an_endpoint_that_does_not_let_us_in_is_told_before_an_episode_begins(
    rollmill: Command, model: Model, run_toml: Path, command: str, status: int, url: str, told: str
) -> None:
    model.door = status
    output = rollmill(command, run_toml, "--model", url.format(model.url))
    assert output.code == 1 and told.format(model.url) in output.err and "Traceback" not in output.err
    assert len(model.requests) == 1 and "task train" not in output.out


@pytest.mark.parametrize(
    ("act", "told"),
    [("raise ValueError('no licence')", "ValueError: no licence"), ("return 1.0", "float, not a Grade")],
)
def test_a_reward_of_the_user_that_fails_or_returns_nonsense(
    rollmill: Command, model: Model, run_toml: Path, monkeypatch: pytest.MonkeyPatch, act: str, told: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_reward", raising=False)
    head = "from rollmill import Reward\nclass Own(Reward):\n"
    source = f"{head}    name = 'own'\n    async def grade(self, episode):\n        {act}\n"
    run_toml.with_name("own_reward.py").write_text(source)
    run_toml.write_text(f"{run_toml.read_text()}\n[[rewards]]\nkind = 'own_reward:Own'\n")
    output = rollmill("rollout", run_toml, "--task", "train/0", "--model", model.url)
    assert output.code == 1 and told in output.out + output.err and "Traceback" not in output.out + output.err


def test_an_endpoint_is_evaluated_with_the_suite_of_the_run(rollmill: Command, model: Model, run_toml: Path) -> None:
    told = rollmill("eval", run_toml, "--model", model.url, "--tasks", "4", "--attempts", "1")
    assert told.code == 0, told.err
    assert {body["model"] for body in model.requests} == {DEFAULT}
    assert (
        told.out.count("2/4") == 4
    )  # held out sampled and greedy, fresh, and the family: the script solves every second
    assert "0.500" in told.out and "by task, hardest first" in told.out and "mean reward" in told.out
    told = rollmill("eval", run_toml, "--model", model.url, "--tasks", "2", "--attempts", "2", "--json")
    results = json.loads(told.out)["results"]
    assert results[0]["reward"] == results[0]["rate"] and results[0]["k"] == 2
    made = [each["reward"] for attempts in results[0]["conduct"].values() for each in attempts]
    assert len(made) == 4 and set(made) <= {0.0, 1.0} and results[0]["families"].keys() == results[0]["conduct"].keys()
