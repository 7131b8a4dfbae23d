"""The OCI images of this host: found, obtained, listed, removed. See oci_image.py for where they are."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import Field, ValidationError

from rollmill.config import Config
from rollmill.errors import TaskError
from rollmill.machines.oci import documents, unpack_layers
from rollmill.machines.oci.build_image import Recipe, built
from rollmill.machines.oci.documents import Configuration, Descriptor, Manifest
from rollmill.machines.oci.image_reference import PREFIX, Reference, parse
from rollmill.machines.oci.oci_image import OciImage
from rollmill.machines.oci.oci_layout import Layout, open_archive
from rollmill.machines.oci.registry_client import Registry
from rollmill.machines.oci.stored_images import Source, StoredImage, stored_digest
from rollmill.storage.objects import Objects

BUILT_HERE = "localhost"  # the registry in names of images that were built on this host
_AT_ONCE = 4  # layers that are fetched and unpacked at the same time
_in_process = threading.Lock()  # the machines of a group ask for the same image at once


class Name(Config):
    """Where a name led to."""

    reference: str = Field(description="The name, without `oci:`.")
    digest: str = Field(description="Of the manifest it led to.")
    seen: str = Field("", description="Of an archive or a layout: which state of it was read.")
    looked_up: float = Field(0.0, description="When, in seconds since 1970.")


class Kept:
    """The directory of all OCI images of this host."""

    def __init__(self, root: Path, store: str | None = None) -> None:
        """`store`: an object store that is asked before a registry, and gets what a registry or a build gave."""
        self._store = store
        self.root = root / "oci"
        self.trees = self.root / "trees"

    def find(self, image: str) -> OciImage | None:
        """The image that a name leads to, if all of it is here. A tag of a registry leads to what it led to first."""
        reference = parse(image)
        if reference.digest:
            found = self._load(self._record(reference.digest))
            return found if found is not None and self._whole(found) else None
        try:
            name = Name.model_validate_json(self._name(reference).read_bytes())
        except (OSError, ValidationError):
            return None
        if name.seen != _state_of(reference):
            return None
        found = self._load(self._record(name.digest))
        return found if found is not None and self._whole(found) else None

    def state(self, image: str) -> str:
        """Changes whenever a name may lead to something else."""
        reference = parse(image)
        place = self._name(reference)
        try:
            return f"{place} {place.stat().st_mtime_ns} {_state_of(reference)}"
        except OSError:
            return "unknown"

    def obtain(self, image: str) -> OciImage:
        """The image of that name, fetched and unpacked if it is not here. TaskError names image, field and remedy."""
        return self.find(image) or self.fetch(image, again=False)

    def fetch(self, image: str, *, again: bool = True) -> OciImage:
        """Look a name up, get what is missing, unpack it. `again`: also if the name is known here."""
        reference = parse(image)
        with _in_process, self._locked(fcntl.LOCK_SH):
            if not again and (found := self.find(image)) is not None:
                return found
            seen = _state_of(reference)
            with self._source(reference, again) as source:
                found = self._make(reference, source)
                if isinstance(source, StoredImage):
                    source.finish(reference, found.digest)
            self._write(self._record(found.digest), found)
            name = Name(reference=reference.text, digest=found.digest, seen=seen, looked_up=time.time())
            self._write(self._name(reference), name)
            return found

    def promise(self, image: str, recipe: Recipe) -> None:
        """Let a name of `localhost` mean what a recipe builds, when it is first needed."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._write(self._recipe(parse(image)), recipe)

    def build(self, image: str, recipe: Recipe) -> OciImage:
        """Build an image now and name it. If that fails, the name leads to what it led to before."""
        place = self._recipe(parse(image))
        before = place.read_bytes() if place.exists() else None
        self.promise(image, recipe)
        try:
            return self.fetch(image)
        except BaseException:
            place.unlink() if before is None else place.write_bytes(before)
            raise

    def all(self) -> list[tuple[Name, OciImage | None]]:
        """Every name; None: its image is not whole."""
        found = []
        for path in sorted((self.root / "names").glob("*.json")):
            with contextlib.suppress(OSError, ValidationError):
                name = Name.model_validate_json(path.read_bytes())
                found.append((name, self._load(self._record(name.digest))))
        return found

    def remove(self, image: str) -> int:
        """Forget a name, and what no other name leads to. Returns the bytes that are free now."""
        place = self._name(parse(image))
        if not place.exists():
            raise TaskError(f"there is no image {image!r}", hint="`rollmill images list` shows them")
        with self._locked(fcntl.LOCK_EX):
            place.unlink(missing_ok=True)
            self._recipe(parse(image)).unlink(missing_ok=True)
            return self._collect()

    def collect(self) -> int:
        """Remove images that no name leads to, layers that no image has, and what killed processes left. Returns the
        bytes that are free now."""
        if not self.root.is_dir():
            return 0
        with self._locked(fcntl.LOCK_EX):
            return self._collect()

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Fetching and collecting do not happen at the same time; several may fetch. TaskError: somebody fetches."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, kind | (fcntl.LOCK_NB if kind == fcntl.LOCK_EX else 0))
                yield
                return
            raise TaskError("images are being fetched or used by machines now", hint="try again when they have ended")
        finally:
            os.close(lock)

    def hold(self) -> int:
        """An open file: while it is open, nothing is removed. For those who have machines of an image."""
        lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        return lock

    def _make(self, reference: Reference, source: Source) -> OciImage:
        what = f"{PREFIX}{reference.text}"
        chosen = source.manifest("" if reference.registry == BUILT_HERE else reference.tag)
        manifest = documents.read(Manifest, source.document(chosen), f"the manifest of {what}")
        if len(manifest.layers) > documents.MOST_LAYERS:
            raise TaskError(
                f"the image {what} has {len(manifest.layers)} layers; at most {documents.MOST_LAYERS} are taken",
                hint="`buildah commit --squash` makes one layer of them",
            )
        data = source.document(manifest.config)
        configuration = documents.read(Configuration, data, f"the configuration of {what}")
        architecture = documents.check_architecture(configuration, what)
        diff_ids = configuration.rootfs.diff_ids
        if len(diff_ids) != len(manifest.layers):
            raise TaskError(
                f"the image {what} is damaged: rootfs.diff_ids names {len(diff_ids)} layers, the manifest "
                f"{len(manifest.layers)}",
                hint="build or copy the image again",
            )
        given = configuration.config
        image = OciImage(
            reference=reference.text,
            digest=chosen.digest,
            architecture=architecture,
            layers=diff_ids,
            bytes=self._unpack(source, manifest, diff_ids, what),
            user=given.User,
            directory=given.WorkingDir or "/",
            environment=dict(each.split("=", 1) for each in given.Env if "=" in each and "\0" not in each),
            entrypoint=given.Entrypoint,
            command=given.Cmd,
        )
        try:
            image.root(self.trees)
        except ValueError as error:
            raise TaskError(
                f"the image {what} cannot be a machine: {error}", hint="correct it and build it again"
            ) from None
        return image

    def _unpack(self, source: Source, manifest: Manifest, diff_ids: tuple[str, ...], what: str) -> int:
        """Make the trees that are missing, several at once. Returns the bytes of all."""
        self.trees.mkdir(exist_ok=True)
        done: list[int] = []  # bytes; the layers that are made later have only what these leave

        def make(layer: Descriptor, diff_id: str) -> int:
            taken = unpack_layers.bytes_of(diff_id, self.trees)
            if taken is None:
                taken = fetch(layer, diff_id, unpack_layers.LARGEST - sum(done))
            done.append(taken)
            return taken

        def fetch(layer: Descriptor, diff_id: str, room: int) -> int:
            blob = source.blob(layer)
            taken = unpack_layers.unpack_layer(blob, diff_id, self.trees, most_bytes=max(0, room))
            if blob.is_relative_to(self.root):
                blob.unlink(missing_ok=True)  # its tree is what machines use
            return taken

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="layers") as pool:
            waiting = [pool.submit(make, *each) for each in zip(manifest.layers, diff_ids, strict=True)]
            try:
                taken = sum(each.result() for each in waiting)
            except BaseException:
                for each in waiting:
                    each.cancel()
                raise
        if taken > unpack_layers.LARGEST:
            raise TaskError(
                f"the image {what} has {taken >> 30} GiB of files; at most {unpack_layers.LARGEST >> 30} are taken"
            )
        return taken

    @contextlib.contextmanager
    def _source(self, reference: Reference, again: bool) -> Iterator[Source]:
        """The store, if there is one and the name means the same on every host; else where the image is from."""
        built_here = reference.registry == BUILT_HERE
        if self._store is None or reference.path is not None:
            own = True
        else:  # the names of tasks are those of what they are built from
            own = built_here and not self._load_recipe(reference).content
        if own:
            with self._origin(reference) as source:
                yield source
            return
        store, blobs = Objects.open(str(self._store)), self.root / "blobs" / "sha256"
        digest = None if again else stored_digest(store, reference)
        if digest is not None:
            yield StoredImage(store, blobs, digest=digest)
            return
        with self._origin(reference) as source:
            yield StoredImage(store, blobs, source)

    @contextlib.contextmanager
    def _origin(self, reference: Reference) -> Iterator[Source]:
        if reference.registry == BUILT_HERE:
            with built(self._load_recipe(reference)) as layout:
                yield layout
        elif reference.path is None:
            with Registry(reference, self.root / "blobs" / "sha256") as registry:
                yield registry
        elif reference.path.is_file():
            with tempfile.TemporaryDirectory(prefix=".archive-", dir=self.root, ignore_cleanup_errors=True) as place:
                yield open_archive(reference.path, Path(place))
        elif reference.path.is_dir():
            yield Layout(reference.path)
        else:
            raise TaskError(
                f"the image '{PREFIX}{reference.text}' is not there: {reference.path.absolute()} does not exist",
                hint="an image of a registry begins with the registry's host: oci:HOST/NAME:TAG",
            )

    def _whole(self, image: OciImage) -> bool:
        return all(unpack_layers.tree_of(layer, self.trees).is_dir() for layer in image.layers)

    def _name(self, reference: Reference) -> Path:
        text = reference.text if reference.path is None else f"{reference.path.absolute()}:{reference.tag}"
        return self.root / "names" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def _load(self, path: Path) -> OciImage | None:
        try:
            return OciImage.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def _record(self, digest: str) -> Path:
        return self.root / "images" / f"{digest.removeprefix('sha256:')}.json"

    def _recipe(self, reference: Reference) -> Path:
        return self.root / "recipes" / self._name(reference).name

    def _load_recipe(self, reference: Reference) -> Recipe:
        try:
            return Recipe.model_validate_json(self._recipe(reference).read_bytes())
        except (OSError, ValidationError):
            raise TaskError(
                f"the image '{PREFIX}{reference.text}' was not built on this host",
                hint="`rollmill images build NAME --dockerfile F --context D` builds oci:localhost/NAME",
            ) from None

    def _write(self, path: Path, record: Config) -> None:
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        unfinished.write_text(record.model_dump_json(indent=1))
        os.replace(unfinished, path)  # there whole or not at all

    def _collect(self) -> int:
        named = {name.digest.removeprefix("sha256:") for name, _ in self.all()}
        for path in (self.root / "images").glob("*"):
            if path.stem not in named:
                path.unlink()
        images = [self._load(path) for path in (self.root / "images").glob("*.json")]
        used = {unpack_layers.tree_of(layer, self.trees).name for image in images if image for layer in image.layers}
        freed = 0
        for path in sorted(self.trees.glob("*")) if self.trees.is_dir() else ():
            if path.name != ".locks" and path.name.removesuffix(".bytes") not in used:
                freed += unpack_layers.remove_tree(path)
        for path in (self.root / "disks").glob("*"):
            if path.is_file() and path.stem not in named:
                freed += path.stat().st_size
                path.unlink()
        for path in [*self.root.glob(".archive-*"), self.root / "blobs"]:
            shutil.rmtree(path, ignore_errors=True)
        return freed


def _state_of(reference: Reference) -> str:
    """What tells whether a file has changed since it was read; "" for an image of a registry."""
    if reference.path is None:
        return ""
    path = reference.path if reference.path.is_file() else reference.path / "index.json"
    try:
        status = path.stat()
    except OSError:
        return "gone"
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
