"""Weights: lines of versions as snapshots and lossless deltas in an object store. FORMAT.md is the format."""

from rollmill.weights.channels import ChannelEntry, Channels
from rollmill.weights.follower import Follower, Update
from rollmill.weights.manifest import Manifest
from rollmill.weights.publisher import Publisher
from rollmill.weights.store import WeightStore
from rollmill.weights.tensors import HostTensor, Tensors
from rollmill.weights.transfer import Mirror

__all__ = [
    "ChannelEntry",
    "Channels",
    "Follower",
    "HostTensor",
    "Manifest",
    "Mirror",
    "Publisher",
    "Tensors",
    "Update",
    "WeightStore",
]
