"""Records how long real test runs take: `python -m benchmarks.record_tool_times` writes benchmarks/tool_times.json.

Each sample is one module of Python's own test suite, run in its own process, as an agent would run the tests of one
part of a repository. `benchmarks.async_speedup` draws its simulated tool times from this distribution, scaled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

MODULES = [
    "argparse",
    "array",
    "base64",
    "binascii",
    "bisect",
    "bool",
    "bytes",
    "calendar",
    "cmath",
    "collections",
    "colorsys",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "deque",
    "dict",
    "difflib",
    "enum",
    "fileinput",
    "fnmatch",
    "fractions",
    "functools",
    "genericpath",
    "getopt",
    "glob",
    "graphlib",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "html",
    "htmlparser",
    "inspect",
    "int",
    "io",
    "ipaddress",
    "itertools",
    "json",
    "keyword",
    "list",
    "locale",
    "math",
    "mimetypes",
    "netrc",
    "numeric_tower",
    "operator",
    "opcodes",
    "pathlib",
    "pprint",
    "queue",
    "quopri",
    "random",
    "range",
    "reprlib",
    "sched",
    "set",
    "shelve",
    "shlex",
    "shutil",
    "slice",
    "statistics",
    "string",
    "struct",
    "tempfile",
    "textwrap",
    "timeit",
    "tokenize",
    "traceback",
    "tuple",
    "types",
    "unicodedata",
    "urlparse",
    "uuid",
    "weakref",
    "zipfile",
    "zlib",
]
OUT = Path(__file__).with_name("tool_times.json")


def main() -> None:
    seconds = {}
    for module in MODULES:
        started = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, "-m", "unittest", "-q", f"test.test_{module}"], capture_output=True, timeout=300
        )
        taken = time.perf_counter() - started
        if b"Ran " in ran.stderr:  # failing tests take time too; a missing module does not count
            seconds[f"test_{module}"] = round(taken, 3)
            print(f"{module:20s} {taken:8.3f} s")
    OUT.write_text(
        json.dumps({"what": "seconds of one run of each module of Python's test suite", "seconds": seconds}, indent=1)
    )


if __name__ == "__main__":
    main()
