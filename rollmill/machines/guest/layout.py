"""Paths, names and ids inside a machine."""

from __future__ import annotations

WORK = "/work"
TEMPORARY = "/tmp"  # noqa: S108
PYTHON = "/opt/python"
PROGRAMS = "/opt/bin"
PACKAGES = "/opt/packages"  # Python packages of the image, if it has any
CODE = "/opt/host"  # the machine host's own source, until the machine host has imported it; then empty
EMULATOR = "/opt/emulator"  # of programs of another architecture, if the image has such
NATIVE = "/opt/native"  # the agent's C library, where the image has programs of another architecture
LAYERS = "/opt/layers"  # of an OCI image, until its machines have a root of their own
INIT = "/run/initctl"  # what commands see as /proc/1
USER = "user"
USER_ID = 1000
HOME = f"/home/{USER}"
HOST_NAME = "devbox"
FIRST_PID = 1374  # about the process ids that a computer has reached after its boot
