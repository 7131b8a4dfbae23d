"""Grading of tasks that ask for `main.py`: hidden Python statements that must run without an error.

    task.grading = {"kind": "script", "files": {"hidden_tests.py": …}, "command": ["python3", "hidden_tests.py"]}

hidden_tests.py deletes itself before it starts submitted code, and gives the statements to a Python that has read all
of them before it imports main.py. It counts as passed only if the last statement was reached, so `sys.exit(0)` in
main.py is no pass. What this cannot protect: main.py runs in the same process as the statements, so code written to
search that process can find them or fake their end.
"""

from __future__ import annotations

from typing import Any

MAIN = "main.py"
_RUNNER = """import os, secrets, subprocess, sys

checks = CHECKS
os.remove(__file__)  # submitted code cannot read it
word = secrets.token_hex(16)
start = "import main; globals().update({k: v for k, v in vars(main).items() if not k.startswith('__')})"
end = f"import os; os.write(1, b'\\\\n{word}')"
script = "\\n".join([start, checks, end])
done = subprocess.run([sys.executable, "-"], input=script.encode(), stdout=subprocess.PIPE)
sys.exit(0 if done.returncode == 0 and done.stdout.endswith(word.encode()) else 1)
"""


def script_grading(checks: str) -> dict[str, Any]:
    """Grading by Python statements that use the names of main.py."""
    name = "hidden_tests.py"
    return {"kind": "script", "files": {name: _RUNNER.replace("CHECKS", repr(checks))}, "command": ["python3", name]}
