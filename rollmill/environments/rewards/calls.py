"""Hidden tests: call the submitted function on inputs the agent never saw and compare what it returns.

    task.grading = {"kind": "calls", "module": "main.py", "function": "f", "cases": [[[3], 4], [[10], 11]]}
                                                                         each case: [arguments, expected value]

The expected values never enter a machine. A fresh one gets the task's pristine files, the submitted files over them, a
small driver and the *inputs*; it sends back what the calls returned, as plain data, and the comparison happens here. So
code that prints a verdict, overrides `__eq__`, patches `json` or the clock, exits early, leaves a process behind or
searches the driver's memory gains nothing: only right return values count.

A value is right if it and all its parts have the expected types too: 1, 1.0 and True are three values. A tuple counts
as a list, because JSON has no tuples. A number that is not finite is never right.
"""

from __future__ import annotations

import json
import math
import secrets
from typing import Any, NamedTuple

from pydantic import Field

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward, TimedConfig
from rollmill.environments.rewards.clean import DoesNotFit, check_image, clean_machine, declared
from rollmill.environments.task import Task
from rollmill.errors import TaskError
from rollmill.machines.machine import ExecResult
from rollmill.types import Grade

_MAX_TEXT = 500  # characters of one value in the evidence
_MAX_OUTPUT = 1000  # characters of what the submitted code printed

# Runs in the machine. Each result is a line of its own that starts with a word drawn for this run, so that nothing the
# candidate prints by accident is taken for one. Only plain data leaves: exact types, so no overridden methods.
_DRIVER = """
import importlib.util, json, os, sys
work = json.load(sys.stdin)
def plain(value):
    kind = type(value)
    if kind is float and value - value != 0:
        raise ValueError("returned " + repr(value))
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [plain(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: plain(item) for key, item in value.items()}
    raise TypeError("returned " + kind.__name__)
def attempt(call):
    try:
        return call()
    except BaseException as error:
        return {"error": type(error).__name__ + ": " + str(error)[:200]}
def tell(index, outcome):
    sys.stdout.flush()
    text = attempt(lambda: json.dumps([index, outcome]))
    text = text if type(text) is str else json.dumps([index, text])
    os.write(1, ("\\n" + work["word"] + " " + text + "\\n").encode())
def load():
    sys.path[0] = os.path.dirname(work["path"])
    spec = importlib.util.spec_from_file_location(work["name"], work["path"])
    module = importlib.util.module_from_spec(spec)
    sys.modules[work["name"]] = module
    spec.loader.exec_module(module)
    return {"function": getattr(module, work["function"])}
loaded = attempt(load)
for index, arguments in enumerate(work["inputs"]):
    if "error" in loaded:
        tell(index, loaded)
        break
    tell(index, attempt(lambda: {"value": plain(loaded["function"](*arguments))}))
"""


class CallsConfig(TimedConfig):
    timeout_s: float = Field(5.0, gt=0, description="Seconds that all hidden cases of one submission may take.")
    max_output: int = Field(1 << 18, ge=1, description="Most bytes of output that the grader reads.")


class _Grading(NamedTuple):
    module: str
    function: str
    inputs: list[list[Any]]
    expected: list[Any]


class Calls(Reward):
    """Value 1 if every case is right, else 0; `parts["cases"]` is the fraction that is."""

    name = "calls"
    kind = "calls"
    cannot_protect = (
        "Submitted code runs in one process with the driver, and sees the inputs. It can answer them one by one, so "
        "use more cases than can be guessed or looked up."
    )

    def __init__(self, config: CallsConfig | None = None) -> None:
        self.config = config or CallsConfig()

    async def grade(self, episode: Episode) -> Grade:
        calls = _parse(episode.task)
        gone = calls.module in episode.task.paths and calls.module not in declared(episode)
        if gone or calls.module in episode.deleted:
            return self._reward(calls, {}, {"missing": calls.module})
        word = secrets.token_hex(8)
        try:
            async with clean_machine(episode, {}, program=None) as machine:
                result = await machine.exec(
                    ["python", "-c", _DRIVER],
                    cwd="/",
                    stdin=_work(calls, word),
                    timeout_s=self.config.timeout_s * machine.capabilities.slowdown,
                    max_output=self.config.max_output,
                )
        except DoesNotFit as error:
            return self._reward(calls, {}, {"unwritable": str(error)})
        outcomes, printed = _split(result, word)
        if not outcomes:  # not even a failed import: the submission ended the driver, or Python does not start at all
            await check_image(episode, "python")
        evidence = {"exit_code": result.exit_code, "stopped": result.stopped, "output": printed[-_MAX_OUTPUT:]}
        return self._reward(calls, outcomes, evidence)

    def _reward(self, calls: _Grading, outcomes: dict[int, Any], evidence: dict[str, Any]) -> Grade:
        right = 0
        for index, expected in enumerate(calls.expected):
            outcome = outcomes.get(index, {"error": "no result"})
            if "value" in outcome and _same(outcome["value"], expected):
                right += 1
            elif "first_wrong" not in evidence:
                wrong = {"arguments": calls.inputs[index], "expected": expected, "outcome": outcome}
                evidence["first_wrong"] = {name: _text(value) for name, value in wrong.items()}
        fraction = right / len(calls.expected)
        return Grade(
            value=1.0 if right == len(calls.expected) else 0.0,
            parts={"cases": fraction},
            evidence=evidence,
            grader=self.name,
        )


def _same(value: Any, expected: Any) -> bool:
    """Equal, and of the same types all the way down: Python finds True == 1 == 1.0."""
    if type(value) is not type(expected):
        return False
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in expected)
    return bool(value == expected)


def _text(value: Any) -> str:
    """A value as it stands in the evidence: bounded, and ASCII, whatever strings it holds."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        return "a value that cannot be shown"
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text)} characters)"


def _parse(task: Task) -> _Grading:
    grading = task.grading
    try:
        if grading["kind"] != "calls":
            raise ValueError(f"kind {grading['kind']!r} is not 'calls'")
        # through JSON, as the results come: a tuple is a list on both sides
        cases = _loads(json.dumps(grading["cases"], allow_nan=False))
        calls = _Grading(
            module=str(grading["module"]),
            function=str(grading["function"]),
            inputs=[list(arguments) for arguments, _ in cases],
            expected=[expected for _, expected in cases],
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise TaskError(
            f"task {task.id}: its grading cannot be read: {error!r}",
            hint='it needs {"kind": "calls", "module", "function", "cases": [[arguments, expected], …]}',
        ) from None
    if not calls.expected:
        raise TaskError(f"task {task.id}: its grading has no cases", hint="without any, everything would pass")
    return calls


def _work(calls: _Grading, word: str) -> bytes:
    name = calls.module.removesuffix(".py").replace("/", ".")
    work = {"word": word, "path": f"/work/{calls.module}", "name": name, "function": calls.function}
    return json.dumps({**work, "inputs": calls.inputs}).encode()


def _split(result: ExecResult, word: str) -> tuple[dict[int, Any], str]:
    """The outcomes by case, and whatever else was printed. Untrusted: what is not of the right form is not a result."""
    outcomes: dict[int, Any] = {}
    printed = []
    for line in result.output.decode("utf-8", "replace").replace("\0", "\ufffd").splitlines():
        if not line.startswith(word):
            printed.append(line)
            continue
        try:
            index, outcome = _loads(line[len(word) :])
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(outcome, dict) and type(index) is int:
            outcomes[index] = outcome
    return outcomes, "\n".join(line for line in printed if line)


def _loads(text: str) -> Any:
    """Strict JSON; ValueError for NaN, Infinity and for numbers such as 1e999 that become infinite."""
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
