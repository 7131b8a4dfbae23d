"""`[cluster]`: where the roles of a run are started."""

from __future__ import annotations

from typing import ClassVar

from rollmill.kinds import KindSection, Slot


class ClusterSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "cluster",
        "rollmill.launch.launcher:Cluster",
        {"local": "rollmill.launch.launchers.local:Local", "ray": "rollmill.launch.launchers.ray:Ray"},
        "rollmill.clusters",
        default="local",
    )
