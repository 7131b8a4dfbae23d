"""Hidden tests: call the submitted function on inputs the agent never saw and compare what it returns.

    task.grading = {"kind": "calls", "module": "main.py", "function": "f", "cases": [[[3], 4], [[10], 11]]}
                                                                         each case: [arguments, expected value]

The expected values never enter a machine. A fresh one gets the task's pristine files, the submitted files over them, a
small driver and the *inputs*; it sends back what the calls returned, as plain data, and the comparison happens here. So
code that prints a verdict, overrides `__eq__`, patches `json` or the clock, exits early, leaves a process behind or
searches the driver's memory has nothing to gain: to be counted right it must return the right values.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, NamedTuple

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.machine import ExecResult, MachineHost
from rollmill.environments.reward import Submission
from rollmill.environments.task import Task
from rollmill.errors import MachineError, TaskError
from rollmill.types import Reward

# Runs in the machine. Each result is a line of its own that starts with a word drawn for this run, so that nothing the
# candidate prints by accident is taken for one. Only plain data leaves: exact types, so no overridden methods.
_DRIVER = """
import importlib.util, json, os, sys
work = json.load(sys.stdin)
def plain(value):
    kind = type(value)
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
    os.write(1, ("\\n" + work["word"] + " " + json.dumps([index, outcome]) + "\\n").encode())
def load():
    sys.path[0] = os.path.dirname(work["path"])
    spec = importlib.util.spec_from_file_location(work["name"], work["path"])
    module = importlib.util.module_from_spec(spec)
    sys.modules[work["name"]] = module
    spec.loader.exec_module(module)
    return {"function": getattr(module, work["function"])}
tell(-1, {})
loaded = attempt(load)
for index, arguments in enumerate(work["inputs"]):
    if "error" in loaded:
        tell(index, loaded)
        break
    tell(index, attempt(lambda: {"value": plain(loaded["function"](*arguments))}))
"""


class HiddenTestsConfig(Config):
    timeout_s: float = Field(5.0, gt=0, description="Seconds that all hidden cases of one submission may take.")
    max_output: int = Field(1 << 18, ge=1, description="Most bytes of output that the grader reads.")


class _Calls(NamedTuple):
    module: str
    function: str
    inputs: list[list[Any]]
    expected: list[Any]


class HiddenTests:
    """Value 1 if every case is right, else 0; `parts["cases"]` is the fraction that is."""

    name = "hidden_tests"

    def __init__(self, config: HiddenTestsConfig | None = None) -> None:
        self.config = config or HiddenTestsConfig()

    async def grade(self, task: Task, submission: Submission, machines: MachineHost) -> Reward:
        calls = _parse(task)
        # only what the task declares: a submitted sitecustomize.py or json.py is nobody's answer
        declared = {path: submission[path] for path in task.submission if path in submission}
        if calls.module in task.submission and calls.module not in declared:
            return self._reward(calls, {}, {"missing": calls.module})
        files = {path: text.encode() for path, text in task.files.items()} | declared
        word = secrets.token_hex(8)
        machine = await machines.create(task.image, files)
        try:
            result = await machine.exec(
                ["python", "-c", _DRIVER],
                cwd="/",
                stdin=_work(calls, word),
                timeout_s=self.config.timeout_s * machine.capabilities.slowdown,
                max_output=self.config.max_output,
            )
        finally:
            await machine.close()
        outcomes, printed = _split(result, word)
        if -1 not in outcomes and result.stopped is None:
            # the driver speaks before it touches the candidate, so this is nothing the candidate did
            raise MachineError(f"grading of {task.id} did not start (exit {result.exit_code}): {printed[-500:]}")
        evidence = {"exit_code": result.exit_code, "stopped": result.stopped, "output": printed[-1000:]}
        return self._reward(calls, outcomes, evidence)

    def _reward(self, calls: _Calls, outcomes: dict[int, Any], evidence: dict[str, Any]) -> Reward:
        right = 0
        for index, expected in enumerate(calls.expected):
            outcome = outcomes.get(index, {"error": "no result"})
            if "value" in outcome and outcome["value"] == expected:
                right += 1
            elif "first_wrong" not in evidence:
                evidence["first_wrong"] = {"arguments": calls.inputs[index], "expected": expected, "outcome": outcome}
        fraction = right / len(calls.expected)
        return Reward(
            value=1.0 if right == len(calls.expected) else 0.0,
            parts={"cases": fraction},
            evidence=evidence,
            grader=self.name,
        )


def _parse(task: Task) -> _Calls:
    grading = task.grading
    try:
        if grading["kind"] != "calls":
            raise ValueError(f"kind {grading['kind']!r} is not 'calls'")
        # through JSON, as the results come: a tuple is a list on both sides
        cases = json.loads(json.dumps(grading["cases"]))
        calls = _Calls(
            module=str(grading["module"]),
            function=str(grading["function"]),
            inputs=[list(arguments) for arguments, _ in cases],
            expected=[expected for _, expected in cases],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(
            f"task {task.id}: its grading cannot be read: {error!r}",
            hint='it needs {"kind": "calls", "module", "function", "cases": [[arguments, expected], …]}',
        ) from None
    if not calls.expected:
        raise TaskError(f"task {task.id}: its grading has no cases", hint="without any, everything would pass")
    return calls


def _work(calls: _Calls, word: str) -> bytes:
    name = calls.module.removesuffix(".py").replace("/", ".")
    work = {"word": word, "path": f"/work/{calls.module}", "name": name, "function": calls.function}
    return json.dumps({**work, "inputs": calls.inputs}).encode()


def _split(result: ExecResult, word: str) -> tuple[dict[int, Any], str]:
    """The outcomes by case, and whatever else was printed. Untrusted: what is not of the right form is not a result."""
    outcomes: dict[int, Any] = {}
    printed = []
    for line in result.output.decode("utf-8", "replace").splitlines():
        if not line.startswith(word):
            printed.append(line)
            continue
        try:
            index, outcome = json.loads(line[len(word) :])
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(outcome, dict) and type(index) is int:
            outcomes[index] = outcome
    return outcomes, "\n".join(line for line in printed if line)
