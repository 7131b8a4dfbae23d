"""Where things lie inside a machine. Facts shared by the two sides of the machine host's start."""

from __future__ import annotations

WORK = "/work"
TEMPORARY = "/tmp"  # noqa: S108
PYTHON = "/opt/python"
PROGRAMS = "/opt/bin"
CODE = "/opt/host"  # the machine host's own source, until it has imported itself
USER_ID = 1000
