"""Configuration and errors: what a user sees when something is mistyped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from rollmill.config import Config, load_config
from rollmill.errors import ConfigError, GatewayError, ObjectMissing, RollmillError, StorageError
from rollmill.runs.run import RunConfig


class Adam(Config):
    kind: Literal["adam"] = "adam"
    beta: float = 0.9


class Momentum(Config):
    kind: Literal["momentum"] = "momentum"
    friction: float = Field(0.1, gt=0)


class Training(Config):
    learning_rate: float = 1e-3
    steps: int = 10
    optimizer: Annotated[Adam | Momentum, Field(discriminator="kind")] = Adam()
    betas: tuple[float, float] = (0.9, 0.95)


class Root(Config):
    seed: int = 0
    training: Training = Training()
    fallback: Training | None = None
    regions: dict[str, Momentum] = Field(default_factory=dict)
    directory: Path = Path("runs")


def problem(*overrides: str, toml: str | None = None, tmp_path: Path | None = None) -> str:
    path = None
    if toml is not None:
        assert tmp_path is not None
        path = tmp_path / "run.toml"
        path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load_config(Root, path, overrides)
    return str(caught.value)


def test_file_and_overrides_make_one_tree(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 3\n[training]\nlearning_rate = 1\nbetas = [0.8, 0.9]\n")
    config = load_config(Root, path, ["training.steps=7", "directory=some where", "regions.away.friction=0.5"])
    assert (config.seed, config.training.learning_rate, config.training.steps) == (3, 1.0, 7)
    assert config.training.betas == (0.8, 0.9) and config.directory == Path("some where")
    assert config.regions["away"].friction == 0.5
    assert load_config(Root, None, ["training.optimizer.kind=momentum"]).training.optimizer == Momentum()


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Root().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("sed=1", "'seed'"),
        ("training.learnin_rate=1", "'training.learning_rate'"),
        ("fallback.step=1", "'fallback.steps'"),
        ("regions.away.frictoin=1", "'regions.away.friction'"),
        ("learning_rte=1", "'training.learning_rate'"),  # right word, wrong section
        ("zzz=1", "valid keys here: seed, training"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(override: str, names: str) -> None:
    message = problem(override)
    assert f"unknown key {override.partition('=')[0]!r}" in message and names in message


def test_unknown_key_in_a_union_is_shown_as_the_file_has_it() -> None:
    message = problem("training.optimizer.kind=momentum", "training.optimizer.frictoin=1.0")
    assert "'training.optimizer.frictoin'" in message and "'training.optimizer.friction'" in message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=abc", "seed: Input should be a valid integer (got 'abc')"),
        ("seed=1.0", "seed: Input should be a valid integer"),
        ("seed=true", "seed: Input should be a valid integer"),
        ('training.steps="5"', "training.steps: Input should be a valid integer"),
        ("regions.away.friction=-1", "regions.away.friction: Input should be greater than 0"),
        ("training=5", "training: "),
        ("seed=2024-01-01", "hint: dates are not used"),
        ("seed", "is not of the form key.path=value"),
        ("=3", "is not of the form key.path=value"),
    ],
)
def test_wrong_values_name_key_value_and_remedy(override: str, says: str) -> None:
    assert says in problem(override)


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    message = problem("training.steps=no", tmp_path=tmp_path, toml='seed = "x"\ncolour = 1\n')
    assert all(part in message for part in ("run.toml", "seed", "colour", "training.steps"))


def test_override_through_a_value_is_refused(tmp_path: Path) -> None:
    assert "is a value, not a section" in problem("seed.deeper=1", tmp_path=tmp_path, toml="seed = 1")


def test_unreadable_files_are_clear(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist\nhint: "):
        load_config(Root, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot be read: .*\nhint: "):
        load_config(Root, tmp_path)
    assert "\nhint: `rollmill init DIR`" in problem(tmp_path=tmp_path, toml="seed = = 1")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(Root, tmp_path / "binary.toml")


def config_classes(model: type[Config]) -> Iterator[type[Config]]:
    for each in model.__subclasses__():
        if each.__module__.startswith("rollmill."):
            yield each
            yield from config_classes(each)


def test_every_setting_has_a_description() -> None:
    models = set(config_classes(Config))
    assert RunConfig in models and len(models) > 12
    for model in models:
        for name, field in model.model_fields.items():
            text = field.description or ""
            assert text.endswith("."), f"{model.__name__}.{name}: describe it in a sentence"


def test_long_values_do_not_flood_the_message() -> None:
    assert len(problem("seed=" + "x" * 5000)) < 300


def test_errors_carry_boundary_message_and_hint() -> None:
    error = StorageError("objects/a is full", hint="make room")
    assert str(error) == "storage: objects/a is full\nhint: make room"
    assert str(ObjectMissing("no object 'a'")) == "storage: no object 'a'"  # not KeyError's quoted repr
    assert isinstance(ObjectMissing("x"), KeyError) and isinstance(ConfigError("x"), ValueError)
    assert GatewayError("x", status=401).status == 401 and issubclass(GatewayError, RollmillError)
