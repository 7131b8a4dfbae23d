"""Runs a command. When it ends or standard input closes, removes its directory and kills its whole process group.

A vLLM server starts further processes that outlive it. The pipe to our standard input closes when the engine process
ends for any reason, kill -9 included.

    python -m rollmill.inference.vllm.vllm_guard DIRECTORY COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading


def main() -> None:
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_input, daemon=True).start()
    print(f"vllm: ended with {child.wait()}", file=sys.stderr, flush=True)
    _end()


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    _end()


def _end() -> None:
    """The engine process started us as the leader of a group of our own."""
    assert os.getpgid(0) == os.getpid(), "the guard must lead its process group"
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
