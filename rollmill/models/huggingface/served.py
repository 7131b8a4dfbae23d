"""Converts a checkpoint directory to the bytes that a line serves, and back.

In the store tensors have our names, so that trainer and engines load them as they are. Both ways write a temporary
file, tensor by tensor. The result is valid inside the `with`, and memory never holds the whole model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch

from rollmill.models.host_tensors import DTYPES, layout_in
from rollmill.models.huggingface.config import Layout
from rollmill.models.huggingface.convert import HuggingFaceModel, empty_state, load_tensors, saved_config
from rollmill.models.huggingface.files import CONFIG
from rollmill.models.huggingface.layouts import named_views
from rollmill.models.quantize import check_layout, place
from rollmill.weights.files.checkpoint_directory import encode_json, read_companions, scratch
from rollmill.weights.format.tensors import WIDTHS, HostTensor, Tensors

FORM = "bf16"  # imports are stored in this form; other forms are made from it
_HOST = torch.device("cpu")


@contextlib.contextmanager
def served_tensors(checkpoint: HuggingFaceModel) -> Iterator[dict[str, HostTensor]]:
    """The weights under our names, rounded to bf16 if the files have more."""
    layout = layout_in(empty_state(checkpoint.layout.model), FORM)
    with _mapped({name: (dtype, shape) for name, dtype, shape in layout}) as served:
        load_tensors({name: place(tensor, _HOST) for name, tensor in served.items()}, checkpoint)
        yield served


def served_companions(checkpoint: HuggingFaceModel) -> dict[str, bytes]:
    """The files beside the weights, verbatim, except that config.json describes what `served_tensors` gives."""
    found = read_companions(checkpoint.files.directory)
    config = saved_config(checkpoint.files.config, DTYPES[FORM], checkpoint.layout)
    if config != checkpoint.files.config:
        found[CONFIG] = encode_json(config)
    return found


@contextlib.contextmanager
def checkpoint_tensors(layout: Layout, tensors: Tensors) -> Iterator[dict[str, HostTensor]]:
    """The weights of a version under the names of `layout`."""
    state = empty_state(layout.model)
    check_layout(state, tensors)
    entries = {
        each.name: (tensors[name].dtype, tuple(each.view.shape))
        for name, empty in state.items()
        for each in named_views(layout, {name: empty})
    }
    with _mapped(entries) as found:
        for name in state:
            for each in named_views(layout, {name: place(tensors[name], _HOST)}):
                place(found[each.name], _HOST).copy_(each.theirs())
        yield found


@contextlib.contextmanager
def _mapped(entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[dict[str, HostTensor]]:
    """Tensors of these dtypes and shapes, mapped from a temporary file that lives inside the `with`."""
    sizes = {name: math.prod(shape) * WIDTHS[dtype] for name, (dtype, shape) in entries.items()}
    with scratch(sizes) as rooms:
        yield {name: HostTensor(dtype, shape, rooms[name]) for name, (dtype, shape) in entries.items()}
