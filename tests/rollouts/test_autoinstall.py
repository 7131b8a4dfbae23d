"""An agent sets repositories up. The model is a script; the harness, the machines and the packages are real."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollmill.errors import TaskError
from rollmill.machines.images.image import built_names, images_directory, load_image
from rollmill.rollouts.agent_endpoint import Endpoint
from rollmill.rollouts.autoinstall import install_repository
from tests.cli.conftest import Told, rollmill  # noqa: F401

DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Script(BaseHTTPRequestHandler):
    """Answers with the commands of its list, one per turn; a second list for an agent that reads of a failure."""

    first: tuple[str, ...] = ()
    again: tuple[str, ...] = ()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        instruction = next(message["content"] for message in body["messages"] if message["role"] == "user")
        turn = sum(message["role"] == "tool" for message in body["messages"])
        commands = (*(self.again if "An earlier attempt" in instruction else self.first), DONE)
        arguments = json.dumps({"command": commands[turn]})
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        answer = json.dumps({"choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def commit_all(directory: Path) -> None:
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *arguments], cwd=directory, check=True, capture_output=True)


def test_a_repository_is_set_up_when_two_clean_machines_pass(
    rollmill: Callable[..., Told],  # noqa: F811
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source = tmp_path / "shop"
    (source / "src").mkdir(parents=True)
    (source / "src" / "shop.py").write_text("price = 3\n")
    commit_all(source)
    # /tmp is not kept: it works in the agent's machine, and a clean one shows that it is not enough
    monkeypatch.setattr(Script, "first", ("ls", "cp src/shop.py /tmp/", "false"))
    monkeypatch.setattr(Script, "again", ("cd src", "cp shop.py ..", "rm shop.py", "cd ..; chmod +x shop.py"))
    check = "python -c 'import shop; assert shop.price == 3'"
    done = rollmill("images", "autoinstall", source, "--verify", check, "--model", model)
    assert done.code == 0 and "$ cp shop.py .." in done.out and "verified twice" in done.out, done
    image = load_image("shop", None)
    assert image.files["shop.py"] == image.files["src/shop.py"] == b"price = 3\n"  # put back
    place = images_directory() / "objects" / image.digest
    recipe = json.loads((place / "recipe.json").read_text())
    assert recipe["commands"] == [*Script.again, DONE] and recipe["verify"] == [check]
    first, again = json.loads((place / "transcript.json").read_text())
    assert "An earlier attempt" not in str(first) and "No module named" in str(again)
    assert built_names() == ["shop"]

    told = rollmill(
        "images", "autoinstall", source, "--name", "no", "--verify", check, "--model", "http://127.0.0.1:9/v1"
    )
    assert told.code == 1 and "http://127.0.0.1:9/v1 cannot be reached" in told.err and built_names() == ["shop"]

    monkeypatch.setattr(Script, "again", ())
    told = rollmill(
        "images", "autoinstall", source, "--name", "no", "--verify", check, "--model", model, "--attempts", 2
    )
    assert told.code == 1 and "2 attempts to set up" in told.err and "No module named" in told.err
    assert built_names() == ["shop"]


PACKAGES = {
    "six==1.17.0": ("python -m pytest -q -x test_six.py -k 'not move_items and not tk'", ()),
    "inflection==0.5.1": (
        "cd /tmp && python -m pytest -q /work/checks",
        ("mkdir checks", "cp -r inflection test_*.py checks/"),
    ),
    "xmltodict==0.13.0": ("cd tests && python -m unittest -q", ("ls", "cp xmltodict.py tests/")),
}


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
async def test_real_packages_are_set_up_with_their_own_tests(
    package: str, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Source distributions from PyPI. Without a network this is skipped."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    downloaded = subprocess.run([*pip, "-d", str(tmp_path), package], capture_output=True, text=True)  # noqa: ASYNC221
    if downloaded.returncode != 0:
        pytest.skip(f"{package} cannot be downloaded: {downloaded.stderr[-200:]}")
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    commit_all(source)
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"pytest=={importlib.metadata.version('pytest')}\n")
    check, commands = PACKAGES[package]
    monkeypatch.setattr(Script, "again", commands)
    monkeypatch.setattr(Script, "first", commands if not commands else ("ls",))
    endpoint = Endpoint(model, "", "policy")
    done = await install_repository("package", source, "HEAD", requirements, [check], endpoint)
    assert done.recipe.commands == [*commands, DONE] and len(done.transcripts) == (2 if commands else 1)
    assert done.record.verified == [check] and done.record.requirements[0].startswith("pytest==")
    with pytest.raises(TaskError, match="1 attempts"):
        await install_repository("never", source, "HEAD", requirements, ["false"], endpoint, attempts=1)


@pytest.mark.parametrize(
    "cheat", ["echo pass > test_shop.py", "rm -r tests; ln -s . tests", "echo 'import os; os._exit(0)' > conftest.py"]
)
async def test_no_recipe_changes_what_tests_check(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cheat: str
) -> None:
    source = tmp_path / "shop"
    (source / "tests").mkdir(parents=True)
    (source / "shop.py").write_text("price = 'broken'\n")
    for name in ("test_shop.py", "tests/test_shop.py"):
        (source / name).write_text("import sys\nsys.path.append('.')\nimport shop\nassert shop.price == 3\n")
    commit_all(source)
    monkeypatch.setattr(Script, "first", (cheat,))
    command = "ls conftest.py" if "conftest" in cheat else "python test_shop.py && python tests/test_shop.py"
    with pytest.raises(TaskError, match=r"is not verified|would change how tests run"):
        await install_repository("shop", source, "HEAD", None, [command], Endpoint(model, "", "m"), attempts=1)
