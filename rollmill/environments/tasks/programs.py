"""Grading of tasks that ask for `main.py`: hidden Python statements, by the reward `script` with verdict `python`.

rollmill/environments/rewards/script.py says what this protects and what it cannot.
"""

from __future__ import annotations

from typing import Any

MAIN = "main.py"
_START = "import main\nglobals().update({k: v for k, v in vars(main).items() if not k.startswith('__')})\n"


def script_grading(checks: str) -> dict[str, Any]:
    """Grading by Python statements that use the names of main.py."""
    return {"kind": "script", "verdict": "python", "test": _START + checks}
