"""`rollmill weights export | import`: writes and reads weights as a Hugging Face directory."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli import display
from rollmill.cli.weights.places import (
    Form,
    LineOfNumber,
    Token,
    Where,
    Which,
    find_form,
    find_version,
    open_place,
)
from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.models.huggingface.config import Layout
    from rollmill.types import PolicyRef, Version
    from rollmill.weights.format.tensors import Tensors

QUANTISED_FORMS = ("fp8", "nvfp4")  # the forms of models.quantize, which needs torch
SCALE = "adapter_scale"  # a tensor that versions with an adapter have (models.adapters, which needs torch)
Adapter = Annotated[
    bool, typer.Option("--adapter", help="write the adapter alone, as PEFT's files; otherwise it is merged")
]


def export(
    where: Where,
    version: Which,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="the directory to write")],
    force: Annotated[bool, typer.Option("--force", help="replace what is in DIR")] = False,
    line: LineOfNumber = None,
    form: Form = None,
    adapter: Adapter = False,
    token: Token = None,
) -> None:
    """Write a version as a Hugging Face directory: safetensors, config.json, tokenizer. Completely, or not at all.

    For example:

        rollmill weights export runs/demo rl@7 out
    """
    _export(where, version, directory, f"is in {directory}", line, form, token, force=force, adapter=adapter)


def push(
    where: Where,
    version: Which,
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="the model on the hub; made if there is none")],
    revision: Annotated[str | None, typer.Option("--revision", help="the branch; the default is main")] = None,
    public: Annotated[bool, typer.Option("--public", help="a new repository can be read by everybody")] = False,
    line: LineOfNumber = None,
    form: Form = None,
    adapter: Adapter = False,
    token: Token = None,
) -> None:
    """Write a version to a Hugging Face hub, as `export` writes it: a commit of a model that others can load.

    HF_TOKEN holds the token that may write there. HF_ENDPOINT names another hub. For example:

        rollmill weights push runs/demo rl@7 acme/agent
    """
    from rollmill.storage import hub

    if hub.Repository.parse(name) is None:
        raise ConfigError(f"{name!r} is no name of a model on a hub", hint="OWNER/NAME")
    with tempfile.TemporaryDirectory(prefix="rollmill-push-") as folder:
        directory = Path(folder) / "export"
        wanted = _export(where, version, directory, f"goes to {name}", line, form, token, adapter=adapter)
        url = hub.push(directory, name, private=not public, revision=revision, message=str(wanted))
    display.console().print(display.safe(url))


def _export(
    where: str,
    version: str,
    directory: Path,
    goes: str,
    line: str | None,
    form: str | None,
    token: str | None,
    *,
    adapter: bool,
    force: bool = False,
) -> Version:
    from rollmill.cli.weights import version_figures as figures
    from rollmill.weights.files.companions import companions_of
    from rollmill.weights.files.exchange import export_directory

    place = open_place(where, token)
    wanted = find_version(place, version, line)
    manifest = place.store.manifest(wanted, find_form(place.store, wanted, form))
    companions, note = _as_trained(companions_of(place.store, manifest))
    with display.progress(display.errors()) as bars:
        loaded = figures.load(bars, place.store, manifest)
        if adapter:
            _write_adapter(directory, companions, loaded, wanted, goes, force)
            return wanted
        with _as_checkpoint(companions, loaded, manifest.policy) as (tensors, policy):
            size = sum(tensor.data.size for tensor in tensors.values())
            task = bars.add_task("writing and checking", total=2 * size)
            files = export_directory(
                directory,
                tensors,
                policy,
                companions,
                force=force,
                advance=lambda count: bars.advance(task, count),
            )
    out = display.console()
    out.print(display.safe(f"{wanted} ({manifest.form}), {display.size(size)}, {goes}"))
    out.print(display.safe("  " + " ".join(path.name for path in files), "dim"))
    if note:
        out.print(f"  {note}", style="yellow")
    if "config.json" not in companions:
        out.print("  no config.json: the store does not know the model's architecture", style="yellow")
    return wanted


def _write_adapter(
    directory: Path, companions: Mapping[str, bytes], tensors: Tensors, version: Version, goes: str, force: bool
) -> None:
    from rollmill.models.huggingface.peft import adapter_files  # torch
    from rollmill.weights.files.checkpoint_directory import write_directory

    layout = _layout(companions.get("config.json"))
    if layout is None:
        raise ConfigError(
            f"{version} has no config.json of a known layout, so its matrices have no names that PEFT knows",
            hint="adapters of runs that began with a Hugging Face checkpoint can be written",
        )
    files = write_directory(directory, (), adapter_files(layout, tensors), force=force)
    out = display.console()
    out.print(display.safe(f"the adapter of {version} {goes}"))
    out.print(display.safe("  " + " ".join(path.name for path in files), "dim"))


def _as_trained(companions: dict[str, bytes]) -> tuple[dict[str, bytes], str]:
    """The files of the model, with the chat template as training wrote with it; and what is to be said about it."""
    from rollmill.chat.chat_files import TEMPLATE
    from rollmill.chat.effective import effective_template
    from rollmill.chat.formats.choice import format_of
    from rollmill.chat.formats.template import TemplateFormat
    from rollmill.chat.sandbox import TemplateFailed
    from rollmill.chat.tokenizer import Tokenizer

    if "tokenizer.json" not in companions:
        return companions, ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(companions["tokenizer.json"])
        try:
            format = format_of(Tokenizer.load(path), companions)
            made = effective_template(format) if isinstance(format, TemplateFormat) else None
        except ConfigError:  # it has no chat format
            return companions, ""
        except TemplateFailed as error:
            return companions, f"the chat template may leave out tools that training wrote: {error}"
    if made is None:
        return companions, ""
    told = "chat_template.jinja also writes tools, calls and results into the text of messages, as training did"
    return {**companions, TEMPLATE: made.encode()}, told


def import_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a directory with safetensors files")],
    where: Where,
    line: Annotated[str, typer.Option("--line", help="the new line; the weights become its version 0")],
    form: Annotated[
        str, typer.Option("--form", help="bf16, fp16 or fp32; with any other name every tensor stays unchanged")
    ] = "bf16",
    convert: Annotated[bool, typer.Option("--convert", help="round values that the form cannot hold exactly")] = False,
    token: Token = None,
) -> None:
    """Import a Hugging Face directory as version 0 of a new line. Its files are checked; nothing in them is executed.

    For example:

        rollmill weights import out runs/demo --line base
    """
    from rollmill.weights.files.checkpoint_directory import read_companions, weight_files
    from rollmill.weights.files.exchange import check_export, import_directory, publish_import

    total = sum(path.stat().st_size for path in weight_files(directory))
    place = open_place(where, token, create=True)
    with display.progress(display.errors()) as bars:
        task = bars.add_task("reading", total=total)
        with import_directory(
            directory, form, lossy=convert, advance=lambda count: bars.advance(task, count)
        ) as imported:
            bars.update(task, completed=total)
            size = sum(tensor.data.size for tensor in imported.tensors.values())
            checking, coding = (bars.add_task(name, total=size) for name in ("checking", "coding and storing"))
            check_export(directory, form, imported, lambda count: bars.advance(checking, count))
            bars.update(checking, completed=size)
            manifest = publish_import(
                place.store,
                directory,
                line,
                form,
                imported,
                read_companions(directory),
                lambda count: bars.advance(coding, count),
            )
    out = display.console()
    sizes = f"{display.size(manifest.full_bytes)} stored as {display.size(manifest.bytes)}"
    out.print(display.safe(f"{manifest.version} ({form}): {len(manifest.tensors)} tensors, {sizes}"))
    out.print(display.safe(f"  digest {manifest.digest}", "dim"))
    if imported.converted:
        converted = display.count(len(imported.converted), "tensor")
        out.print(display.safe(f"  {converted} with another dtype converted to {form}", "yellow"))
    dtypes = sorted({tensor.dtype for tensor in manifest.tensors})
    if form not in ("bf16", "fp16", "fp32") and dtypes != [form]:
        out.print(display.safe(f"  every tensor is unchanged, in the form {form}: {', '.join(dtypes)}", "yellow"))


@contextlib.contextmanager
def _as_checkpoint(
    companions: Mapping[str, bytes], tensors: Tensors, policy: PolicyRef
) -> Iterator[tuple[Tensors, PolicyRef]]:
    """The weights under the names that config.json's layout has, if the run began with a checkpoint of that layout.
    Codes of a quantised form become the bf16 numbers they encode. Quantising those gives the same codes again."""
    from rollmill.weights.format.manifest import describe, root_digest

    if "embedding" not in tensors:  # our own name; otherwise the tensors have a checkpoint's names already
        yield tensors, policy
        return
    layout, quantised = _layout(companions.get("config.json")), policy.form in QUANTISED_FORMS
    adapted = SCALE in tensors
    with contextlib.ExitStack() as stack:
        if quantised or adapted:
            from rollmill.models.merging import plain  # torch

            tensors, policy = plain(tensors, policy.form), replace(policy, form="bf16" if quantised else policy.form)
        if layout is not None:
            from rollmill.models.huggingface.served import checkpoint_tensors  # torch

            tensors = stack.enter_context(checkpoint_tensors(layout, tensors))
        if adapted or quantised or layout is not None:
            policy = replace(policy, digest=root_digest(describe(tensors)))
        yield tensors, policy


def _layout(config: bytes | None) -> Layout | None:
    from rollmill.models.huggingface.config import read_layout

    try:
        tree = json.loads(config or b"")
        return read_layout(tree) if isinstance(tree, dict) else None
    except (ConfigError, ValueError, RecursionError):
        return None
