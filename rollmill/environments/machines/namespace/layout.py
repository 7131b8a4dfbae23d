"""Paths and ids inside a machine."""

from __future__ import annotations

WORK = "/work"
TEMPORARY = "/tmp"  # noqa: S108
PYTHON = "/opt/python"
PROGRAMS = "/opt/bin"
PACKAGES = "/opt/packages"  # Python packages of the image, if it has any
CODE = "/opt/host"  # the machine host's own source, until the machine host has imported it; then empty
USER_ID = 1000
