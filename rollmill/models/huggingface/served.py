"""Between a checkpoint and the bytes that a line serves: a run begins with one, and every version can be one again.

In the store tensors have our names, so that trainer and engines load them as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.models.host import DTYPES, load_host, to_host
from rollmill.models.huggingface.config import Layout
from rollmill.models.huggingface.convert import Checkpoint, load_tensors, saved_config
from rollmill.models.huggingface.files import CONFIG, encode_json
from rollmill.models.huggingface.layouts import pieces
from rollmill.weights.files import read_companions
from rollmill.weights.tensors import HostTensor, Tensors

FORM = "bf16"  # of what is imported: other forms are made from it
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def served_tensors(checkpoint: Checkpoint) -> dict[str, HostTensor]:
    """The weights under our names, rounded to bf16 where the files have more."""
    model = _decoder(checkpoint.layout)
    load_tensors(model, checkpoint)
    return to_host(model.state_dict(), FORM)


def served_companions(checkpoint: Checkpoint) -> dict[str, bytes]:
    """What lies beside the weights, verbatim; but config.json describes what `served_tensors` gives."""
    found = read_companions(checkpoint.files.directory)
    config = saved_config(checkpoint.files.config, DTYPES[FORM], checkpoint.layout)
    if config != checkpoint.files.config:
        found[CONFIG] = encode_json(config)
    return found


def checkpoint_tensors(layout: Layout, tensors: Tensors) -> dict[str, HostTensor]:
    """A version's weights under the names of a layout."""
    model = _decoder(layout)
    load_host(model, tensors)
    return {
        piece.name: _host(piece.view if piece.order is None else piece.view.index_select(0, piece.order.argsort()))
        for piece in pieces(layout, model.state_dict())
    }


def _decoder(layout: Layout) -> Decoder:
    # the table of angles is not needed here, and would be long
    return Decoder(layout.model.model_copy(update={"max_context": 1}), DTYPES[FORM])


def _host(tensor: Tensor) -> HostTensor:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return HostTensor(_NAMES[tensor.dtype], tuple(tensor.shape), data)
