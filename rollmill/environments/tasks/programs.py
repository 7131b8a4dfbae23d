"""Grading of tasks that ask for `main.py`: hidden Python statements, by the reward `script` with verdict `python`.

rollmill/environments/rewards/script.py says what this protects and what it cannot.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

MAIN = "main.py"
_START = "import main\nglobals().update({k: v for k, v in vars(main).items() if not k.startswith('__')})\n"


def script_grading(checks: str) -> dict[str, Any]:
    """Grading by Python statements that use the names of main.py."""
    return {"kind": "script", "verdict": "python", "test": _START + checks}


def parse_python(source: str) -> ast.Module:
    """`ast.parse` without the warnings of Python about somebody else's code: an unknown escape such as "\\d" is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
