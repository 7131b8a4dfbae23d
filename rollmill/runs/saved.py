"""What says what a run is: run.json in its directory, and a description in its store, which has no secret."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError, ObjectMissing, StorageError
from rollmill.storage.objects import Objects
from rollmill.storage.storage_probe import NEEDS, PATIENCE_S

KEY = "cluster/run.json"
SERVICE = "service.json"
FORMAT = 1  # of both: a change that an older or newer rollmill would read wrongly gets the next number
_URL = re.compile(r"(s3|gs|az):/+(.+?)/*")  # a Path folds the two slashes into one


def url_of(path: Path) -> str | None:
    """The URL that a user gave where a directory may stand too."""
    found = _URL.fullmatch(str(path))
    return f"{found[1]}://{found[2]}" if found else None


def saved_config(path: Path) -> dict[str, Any]:
    """The configuration of a run, by its directory or the URL of its objects."""
    if (url := url_of(path)) is not None:
        with reading_description(url) as about:
            return dict(about["config"])
    with reading(path):
        directory = path.parent.parent if (path / SERVICE).exists() else path
        return dict(read_saved(directory)["config"])


def read_saved(directory: Path) -> dict[str, Any]:
    """What run.json says. To be called inside `reading`."""
    saved: dict[str, Any] = json.loads((directory / "run.json").read_text())
    check_format(saved, str(directory / "run.json"))
    return saved


def check_format(saved: dict[str, Any], where: str) -> None:
    """Raises ConfigError if a rollmill described the run that writes another format. 0: from before there were any."""
    found = saved.get("format", 0)
    if "config" not in saved or found == FORMAT:
        return
    saves = "`rollmill trajectories export` and `rollmill weights export` of that release save what it holds"
    older = f"an older rollmill began the run, which is unchanged: {saves}"
    raise ConfigError(
        f"{where} has format {found}; this rollmill reads format {FORMAT}",
        hint=older if found in range(FORMAT) else "a newer rollmill began the run: use that one",
    )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors inside as ConfigError: the directory holds no run, or its run.json is not readable or damaged."""
    file = path / "run.json"
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        file = path if path.suffix == ".toml" else path / "run.toml"  # as `rollmill init` writes it
        meant = "" if file == path else f"did you mean {file}? "
        train = f"{meant}`rollmill train {file}` makes a run of it; " if file.is_file() else ""
        raise ConfigError(
            f"{path} holds no run (no run.json)", hint=f"{train}`rollmill runs` lists the runs there are"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}",
            hint="it has the keys of the run: only its owner may read it",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged: {error!r}", hint="restore it, or start a run of another name") from None


@contextlib.contextmanager
def reading_description(url: str) -> Iterator[dict[str, Any]]:
    """The description of a run in its store. Raises ConfigError if there is none, or it lacks what is read inside."""
    try:
        about = json.loads(Objects.open(url, patience=PATIENCE_S).get(KEY))
        check_format(about, f"{url}/{KEY}")
        yield about
    except ObjectMissing:
        raise ConfigError(f"{url} holds no run", hint="the URL is `store`, a slash and the run's id") from None
    except StorageError as error:
        raise ConfigError(f"{url} cannot be read: {error.message}", hint=NEEDS) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{url}/{KEY} is damaged: {error!r}") from None
