"""`python FILE`, `python -c CODE` and `python -m MODULE` without starting an interpreter.

Pid 1 of a machine already is a Python of the right installation. A fork of it runs the program as a fresh `__main__`.
Differences from a cold start:

- a few modules of the standard library are imported already (a file of the same name is not imported);
- the hash seed is the machine host's, so sets of strings iterate alike in all machines of one host;
- `PYTHON*` variables given with the command and `sitecustomize` have no effect, since both act at start-up;
- at the end, exit handlers run and buffers are flushed, but module globals are not torn down.

Anything else (other options, directories, archives) starts a real interpreter.
"""

from __future__ import annotations

import _signal  # not signal: its enums cost more time here than all the rest
import atexit
import importlib.machinery
import io
import os
import runpy
import sys
import types
from typing import NoReturn

_NAMES = ("python", "python3")


def can_run(argv: list[str]) -> bool:
    if argv[0] not in _NAMES or len(argv) < 2:
        return False
    if argv[1] in ("-c", "-m"):
        return len(argv) > 2
    return not argv[1].startswith("-") and os.path.isfile(argv[1])


def run(argv: list[str]) -> NoReturn:
    """In a process forked for it, standard streams in place."""
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # pid 1 has no handler
    sys.orig_argv = argv
    code = 0
    try:
        _execute(argv)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # hide our own frames
        error.__traceback__ = trace
        sys.excepthook(type(error), error, trace)
        code = 1
    os._exit(_finish(code))


def _execute(argv: list[str]) -> None:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    if argv[1] == "-m":
        sys.argv = ["-m", *argv[3:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[2])  # type: ignore[attr-defined]  # what `python -m` itself calls
        return
    if argv[1] == "-c":
        sys.argv = ["-c", *argv[3:]]
        sys.path.insert(0, "")
        source: bytes | str = argv[2]
        name = "<string>"
    else:
        name = os.path.abspath(argv[1])
        sys.argv = argv[1:]
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
        with io.open_code(name) as file:
            source = file.read()
        module.__file__ = name
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", name)
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)  # noqa: S102


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _finish(code: int) -> int:
    try:
        if threading := sys.modules.get("threading"):
            threading._shutdown()  # as the interpreter does: wait for threads, then run exit handlers
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return code or 120
    return code
