"""Rewards grade in an OCI image, with its own Python and its own packages."""

from __future__ import annotations
