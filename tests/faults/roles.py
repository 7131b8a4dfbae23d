"""The processes of a test world: trainer, object server, region keeper, follower. Each writes its state to its own
file, one JSON object per line, whenever it changes.

python -m tests.faults.roles      the nursery: forks them, so that a killed one restarts quickly. It reads commands from
                                  its input, one JSON object per line: {"start": {…}} {"signal": [pid, number]}
                                  {"ended": pid}
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from rollmill import telemetry
from rollmill.errors import StorageError, WeightsError
from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from rollmill.weights import HostTensor, LineFollower, Mirror, Publisher, WeightStore
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading import line_follower as follower_module
from rollmill.weights.reading import weight_store as store_module
from rollmill.weights.regions import keeper as region_module
from rollmill.weights.regions import mirror as transfer_module
from rollmill.weights.regions.keeper import RegionKeeper, Round
from tests.weights.build import make_tensors
from tests.weights.follow import Parameters

LINE = "rl"
SHAPES = {"embed.weight": (1500, 64), "layers.0.experts": (4, 64, 128), "layers.0.norm": (64,), "head": (700, 64)}
_EVERY = 200  # an element moves once in this many versions

Given = dict[str, Any]
Tell = Callable[..., None]


# -- weights that every process can compute: a function of the version's number and its trainer


@functools.cache
def _beginning() -> dict[str, HostTensor]:
    return make_tensors(0, SHAPES)


@functools.cache
def _phases(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.integers(0, _EVERY, int(np.prod(shape)), np.uint16) for name, shape in SHAPES.items()}


def weights(number: int, seed: int = 0) -> dict[str, HostTensor]:
    """With each number half a percent of the elements moves by one unit in the last place, and a few by far more."""
    tensors = {}
    for name, tensor in _beginning().items():
        bits = tensor.data.view(np.uint16) + (_phases(seed)[name] + np.uint16(number)) // np.uint16(_EVERY)
        bits[seed::997] += np.uint16(700 * number % 65536)
        tensors[name] = HostTensor(tensor.dtype, tensor.shape, bits.view(np.uint8))
    return tensors


@functools.cache
def digest_of(number: int, seed: int = 0) -> str:
    return root_digest(describe(weights(number, seed)))


FULL_BYTES = sum(tensor.data.nbytes for tensor in _beginning().values())


# -- the roles


def trainer(given: Given, tell: Tell) -> None:
    """Publishes up to the number in the file `goal`. Retries after errors; ends when it is fenced."""
    publisher = Publisher(WeightStore(_open(given["store"], given)), LINE, snapshot_every=given["snapshot_every"])
    resumed = False
    while True:
        try:
            if not resumed:
                publisher.resume()
                resumed = True
            number = publisher.last.number + 1 if publisher.last else 0
            if number <= int(Path(given["goal"]).read_text()):
                began = time.monotonic()
                done = publisher.publish(number, weights(number, given["seed"]), metadata={"step": number})
                seconds = time.monotonic() - began
                telemetry.emit("publish", line=LINE, version=number, digest=done.digest, seconds=seconds)
            last = publisher.last
            tell(number=last.number if last else None, digest=last.digest if last else None, problem=publisher.problem)
        except (StorageError, WeightsError) as error:
            tell(problem=str(error))
            if "is fenced" in error.message:
                return
            # a late version of the fenced writer: continue from it
            resumed = resumed and "has diverged" not in error.message
        time.sleep(given["pause"])


def server(given: Given, tell: Tell) -> None:
    """Serves a store to other regions."""
    tell(problem=None)
    app = object_app(Objects.open(given["store"]))
    web.run_app(app, host="127.0.0.1", port=given["port"], print=None, handle_signals=False, access_log=None)


def keeper(given: Given, tell: Tell) -> None:
    class Told(RegionKeeper):
        def step(self) -> Round:
            done = super().step()
            tell(
                problem=self.problem,
                copied=[version.number for version in done.versions],
                bytes=done.bytes,
                anchored=done.anchored,
                removed=done.removed,
            )
            return done

    Told(
        _open(given["source"], given),
        Objects.open(given["store"]),
        LINE,
        region=given["region"],
        anchor_every=given["anchor_every"],
        keep=given["keep"],
        collect_seconds=0.1,
    ).run(threading.Event())


def follower(given: Given, tell: Tell) -> None:
    """An engine without a model: writes updates into its parameters, and checks all of them."""
    name, region = given["name"], given["region"]
    objects = _open(given["store"], given)
    mirror = Mirror(_open(given["source"], given), objects, region) if given.get("source") else None
    about = {"engine": name, "region": region}
    follower = LineFollower(WeightStore(objects), LINE, mirror=mirror, holder=name, about=about)
    engine, updates = Parameters(), 0
    asked = _signals(signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    while True:
        if asked(signal.SIGUSR1) and follower._course.host:
            follower._course.host._memory["head"][77] ^= 4
        if asked(signal.SIGUSR2):
            engine.tensors["head"].data[77] ^= 4
        if asked(signal.SIGHUP):
            follower.hint()
        update, healed = follower.poll(), False
        if update is not None:
            engine.apply(update)
            if engine.digest() != update.policy.digest:  # as the audit of an engine would
                update, healed = follower.again(), True
                assert update is not None, follower.problem
                engine.apply(update)
            updates += 1
            since = time.time() - update.created_at
            about = {"engine": name, "region": region, "line": LINE, "version": update.policy.number}
            telemetry.emit("apply", **about, digest=update.policy.digest, since_publish_seconds=since)
            read = update.bytes
        current = follower.current
        if current is None:
            tell(number=None, digest=None, problem=follower.problem)
        else:
            serving = {"number": current.number, "digest": engine.digest(), "healed": healed}
            tell(**serving, problem=follower.problem, updates=updates, bytes=read)
        follower.wait(0.05)


ROLES = {"trainer": trainer, "server": server, "keeper": keeper, "follower": follower}


def _open(url: str, given: Given) -> Objects:
    return Objects.open(url, options=given.get("options"), patience=given["patience"])


def _signals(*numbers: int) -> Callable[[int], bool]:
    """Whether a signal came since the last call."""
    came: set[int] = set()
    for number in numbers:
        signal.signal(number, lambda number, _: came.add(number))

    def asked(number: int) -> bool:
        try:
            came.remove(number)
        except KeyError:
            return False
        return True

    return asked


# -- the nursery


def _hurry() -> None:
    """Shortens all pauses between retries: a minute of faults takes seconds, with as many attempts and failures. Every
    second look lists the store."""
    for module in (follower_module, region_module):
        module._RETRY_SECONDS = 0.05, 0.4  # type: ignore[attr-defined]
        module._SUCCESSOR_SECONDS = 0.2  # type: ignore[attr-defined]
    region_module._HINT_SECONDS, region_module._IDLE_SECONDS = 0.3, 0.05
    store_module._LISTING_SECONDS = transfer_module._LISTING_SECONDS = 0.3


def _live(given: Given) -> None:
    """Runs a child process."""
    folder, name = Path(given["folder"]), given["name"]
    output = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(target, stream)
    if given.get("clock"):
        real, shift = time.time, given["clock"]
        time.time = lambda: real() + shift
    telemetry.open_events(folder / "events", name)
    told: list[bytes] = []
    with (folder / f"{name}.jsonl").open("ab", buffering=0) as file:

        def tell(**how: Any) -> None:
            line = json.dumps({"pid": os.getpid(), **how}).encode() + b"\n"
            if told != [line]:
                told[:] = [line]
                file.write(line)

        ROLES[given["role"]](given, tell)


def _fork(given: Given) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _live(given)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def _children() -> Iterator[set[int]]:
    alive: set[int] = set()
    try:
        yield alive
    finally:
        for child in alive:
            os.kill(child, signal.SIGKILL)


def nursery() -> None:
    _hurry()
    weights(0)
    with _children() as alive:
        for line in sys.stdin:
            order = json.loads(line)
            answer: int | None = None
            if "start" in order:
                answer = _fork(order["start"])
                alive.add(answer)
            elif "signal" in order:
                child, number = order["signal"]
                if child in alive:
                    os.kill(child, number)
            elif order["ended"] in alive:
                options = 0 if order["wait"] else os.WNOHANG
                ended, status = os.waitpid(order["ended"], options)
                if ended:
                    alive.remove(ended)
                    answer = os.waitstatus_to_exitcode(status)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    nursery()
