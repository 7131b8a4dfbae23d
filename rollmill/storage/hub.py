"""Files of a Hugging Face hub or of a mirror of it: `HF_ENDPOINT` names it, `HF_TOKEN` opens what is not public.

huggingface_hub moves the bytes, several files at once. Here is added what it does not do: a checkpoint is continued in
the middle of a file, the disk must have room before the first byte, and every file must have the hash the hub names.

    hf://datasets/OWNER/NAME[@REVISION][/FILE]    a path of a source or of tasks; FILE may be a glob, such as *.parquet
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

from rollmill.errors import RollmillError, StorageError

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

SCHEME = "hf://datasets/"
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?")
_THREADS = 8


class Repository(NamedTuple):
    name: str  # OWNER/NAME
    revision: str | None = None  # a branch, tag or commit
    kind: Literal["model", "dataset"] = "model"

    @classmethod
    def parse(cls, text: str, kind: Literal["model", "dataset"] = "model") -> Repository | None:
        match = _NAME.fullmatch(text)
        return None if match is None or text.startswith(".") else cls(match[1], match[2], kind)


Choose = Callable[[Sequence[str]], Sequence[str]]


def fetch(repository: Repository, choose: Choose, to: Path) -> None:
    """Loads the files that `choose` takes of the names. Continues what an earlier attempt left in `to`."""
    api = _api(repository.name)
    try:
        commit, wanted = _listed(api, repository, choose)
        _expect_room(repository.name, wanted, to)
        to.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_THREADS) as pool:
            done = list(pool.map(partial(_load, api, repository, commit, to), wanted))
    except RollmillError:
        raise
    except Exception as error:  # of huggingface_hub, and of its HTTP client
        raise _explained(repository, api.endpoint, error) from None
    _refuse_broken(repository.name, [file for file, whole in zip(wanted, done, strict=True) if not whole])


def fetch_cached(repository: Repository, choose: Choose) -> Path:
    """The folder in huggingface_hub's cache that has these files, also when the hub cannot be reached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    api, name, kind = _api(repository.name), repository.name, repository.kind
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub"))
    load = partial(api.snapshot_download, name, repo_type=kind, cache_dir=cache.expanduser(), max_workers=_THREADS)
    try:
        commit, wanted = _listed(api, repository, choose)
        new = [
            file
            for file in wanted
            if not isinstance(try_to_load_from_cache(name, file.path, cache.expanduser(), commit, kind), str)
        ]
        _expect_room(name, new, cache.expanduser())
        folder = Path(load(revision=commit, allow_patterns=[glob.escape(each.path) for each in wanted]))
    except RollmillError:
        raise
    except Exception as error:
        if isinstance(error, HfHubHTTPError):  # the hub has answered
            raise _explained(repository, api.endpoint, error) from None
        try:  # a process of a run may start again while the hub is away
            return Path(load(revision=repository.revision, local_files_only=True, allow_patterns=[]))
        except Exception:
            raise _explained(repository, api.endpoint, error) from None
    with ThreadPoolExecutor(_THREADS) as pool:
        whole = list(pool.map(lambda file: _is_whole(folder / file.path, file), new))
    broken = [file for file, good in zip(new, whole, strict=True) if not good]
    for file in broken:
        (folder / file.path).resolve().unlink()
    _refuse_broken(name, broken)
    return folder


def _listed(api: HfApi, repository: Repository, choose: Choose) -> tuple[str, list[RepoFile]]:
    """The commit, and what `choose` takes of its files."""
    import huggingface_hub

    commit = api.repo_info(repository.name, revision=repository.revision, repo_type=repository.kind).sha
    tree = api.list_repo_tree(repository.name, recursive=True, revision=commit, repo_type=repository.kind)
    files = {each.path: each for each in tree if isinstance(each, huggingface_hub.RepoFile)}
    wanted = [files[name] for name in choose(sorted(files))]
    if commit is None or any(".." in Path(each.path).parts or Path(each.path).is_absolute() for each in wanted):
        raise StorageError(f"{repository.name} has a file outside its folder", hint="do not use this repository")
    return commit, wanted


def _load(api: HfApi, repository: Repository, commit: str, to: Path, file: RepoFile) -> bool:
    """Whether the file is there, with the right hash. huggingface_hub's own download forgets a file that is not whole
    when the process ends; of a checkpoint these are gigabytes."""
    from huggingface_hub import file_download, hf_hub_url

    path, part = to / file.path, to / f".{_hash_of(file)}.part"  # never continued with bytes of another file
    if path.exists() and _is_whole(path, file):
        return True
    url = hf_hub_url(repository.name, file.path, repo_type=repository.kind, revision=commit, endpoint=api.endpoint)
    found = api.get_hf_file_metadata(url=url)
    headers = _headers(api, same_host=urlsplit(found.location).netloc == urlsplit(url).netloc)
    with part.open("ab") as out:
        file_download.http_get(found.location, out, resume_size=out.tell(), headers=headers, expected_size=file.size)
    if not _is_whole(part, file):
        part.unlink()
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, path)
    return True


def _headers(api: HfApi, *, same_host: bool) -> dict[str, str]:
    """A redirect to another host does not get the token."""
    from huggingface_hub.utils import _headers as theirs

    return theirs.build_hf_headers(token=api.token if same_host else False)


def dataset_path(path: str) -> str:
    """Where the files of an hf:// path are now."""
    owner, name, *inner = path.removeprefix(SCHEME).split("/", 2)
    repository = Repository.parse(f"{owner}/{name}", "dataset")
    if repository is None:
        raise StorageError(f"{path!r} names no dataset", hint=f"{SCHEME}OWNER/NAME@REVISION/FILE")
    pattern = inner[0] if inner else "*"

    def choose(names: Sequence[str]) -> list[str]:
        found = [each for each in names if fnmatchcase(each, pattern) or each.startswith(f"{pattern}/")]
        if not found:
            kept = ", ".join(names[:10])
            raise StorageError(f"{repository.name} has no file {pattern!r}", hint=f"it has {kept}")
        return found

    folder = fetch_cached(repository, choose)
    return f"{glob.escape(str(folder))}/{pattern}" if inner else str(folder)


def push(directory: Path, name: str, *, private: bool, revision: str | None, message: str) -> str:
    """Uploads the files of a directory as one commit of a model; makes the repository if there is none. Returns the
    commit's URL."""
    api = _api(name)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=directory, revision=revision, commit_message=message)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise StorageError(
            f"{name} could not be written at {api.endpoint}: {reason}",
            hint="HF_TOKEN has to hold a token that may write there; HF_HUB_DISABLE_XET=1 for a mirror without Xet",
        ) from None
    return str(done.commit_url)


def _api(name: str) -> HfApi:
    try:
        import huggingface_hub
    except ImportError:
        raise StorageError(f"{name} on a hub needs huggingface_hub", hint="pip install 'rollmill[models]'") from None
    return huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def _expect_room(name: str, files: Sequence[RepoFile], to: Path) -> None:
    parent = next(each for each in (to.absolute(), *to.absolute().parents) if each.exists())
    held = sum(
        path.stat().st_size
        for each in files
        for path in (to / each.path, to / f".{_hash_of(each)}.part")
        if path.exists()
    )
    needed, free = sum(each.size for each in files) - held, shutil.disk_usage(parent).free
    if needed > free:
        raise StorageError(
            f"{name} needs {needed / 1e9:.1f} GB more, and the disk of {parent} has {free / 1e9:.1f} GB",
            hint="make room there, or name a place on another disk (--to, HF_HOME)",
        )


def _hash_of(file: RepoFile) -> str:
    """sha256 of a large file; of others the hub names git's own hash."""
    return file.lfs.sha256 if file.lfs else file.blob_id


def _is_whole(path: Path, file: RepoFile) -> bool:
    size = path.stat().st_size
    if size != file.size:
        return False
    digest = hashlib.sha256() if file.lfs else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as data:
        hashlib.file_digest(data, lambda: digest)
    return digest.hexdigest() == _hash_of(file)


def _refuse_broken(name: str, files: Sequence[RepoFile]) -> None:
    if files:
        raise StorageError(
            f"{', '.join(each.path for each in files[:3])} of {name} has not the hash that the hub names",
            hint="run it again, which loads what is broken once more; if it stays so, do not use it",
        )


def _explained(repository: Repository, endpoint: str, error: Exception) -> StorageError:
    from huggingface_hub import errors

    name = repository.name
    if isinstance(error, errors.GatedRepoError):
        ask = f"ask for access at {endpoint}/{name}, then set HF_TOKEN to a token of that account"
        return StorageError(f"{name} is gated: its owner decides who may load it", hint=ask)
    if isinstance(error, errors.RevisionNotFoundError):
        return StorageError(f"{name} has no revision {repository.revision!r}", hint="a branch, a tag or a commit")
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "check the name; HF_TOKEN has to hold a token if it is private; HF_ENDPOINT names another hub"
        return StorageError(f"{endpoint} has no {repository.kind} {name}, or it is private", hint=hint)
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return StorageError(
        f"{name} could not be downloaded: {reason}",
        hint="run it again, which continues where it stopped; without access to the hub, HF_ENDPOINT names a mirror, "
        "or give a directory",
    )
