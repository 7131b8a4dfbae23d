"""Who we are to a registry: from the environment, or from the file that `docker login` and `podman login` write.

    ROLLMILL_REGISTRY=HOST, ROLLMILL_REGISTRY_USER, ROLLMILL_REGISTRY_PASSWORD      of that registry alone
    $REGISTRY_AUTH_FILE, $XDG_RUNTIME_DIR/containers/auth.json, $DOCKER_CONFIG/config.json, ~/.docker/config.json

They are in no setting, and nothing prints them.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

_DOCKER = ("docker.io", "index.docker.io", "https://index.docker.io/v1/")


@dataclass(frozen=True)
class Credentials:
    user: str
    password: str = field(repr=False)


def find_credentials(registry: str) -> Credentials | None:
    """Of a registry; None: there are none, and it is asked as anybody."""
    if os.environ.get("ROLLMILL_REGISTRY") == registry:
        user, password = (os.environ.get(f"ROLLMILL_REGISTRY_{name}", "") for name in ("USER", "PASSWORD"))
        return Credentials(user, password)
    names = (registry, f"https://{registry}", f"https://{registry}/", *(_DOCKER if registry in _DOCKER else ()))
    for path in _files():
        try:
            entries = json.loads(path.read_bytes())["auths"]
            found = next((entries[name]["auth"] for name in names if name in entries), None)
            if found:
                user, _, password = base64.b64decode(found).decode().partition(":")
                return Credentials(user, password)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error):
            continue
    return None


def _files() -> list[Path]:
    found = []
    if explicit := os.environ.get("REGISTRY_AUTH_FILE"):
        found.append(Path(explicit))
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        found.append(Path(runtime, "containers", "auth.json"))
    found.append(Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker", "config.json"))
    return found
