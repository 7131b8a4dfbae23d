"""The files that a run keeps before its first version. The next start completes an interrupted one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.errors import ConfigError
from rollmill.models.huggingface.config import config_from_huggingface
from rollmill.runs.prepare import check_tokenizer, keep_tokenizer, make_tokenizer
from rollmill.runs.run import RunDirectory
from rollmill.storage.objects import Objects
from rollmill.weights.files.companions import index_key, kept_companions
from tests.runs.checkpoints import chat_tokenizer
from tests.runs.conftest import make_config

MODEL = {"vocab_size": 300, "layers": 1, "width": 64}


class CutShort(Exception):
    pass


@pytest.mark.parametrize("created", [0, 1, 2, 3, 4])
def test_an_interrupted_start_is_completed_by_the_next(
    created: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_tokenizer(SPECIAL_TOKENS).save(tmp_path / "words.json")
    model = (f"model.{name}={value}" for name, value in MODEL.items())
    config = make_config(f"tokenizer={tmp_path / 'words.json'}", *model)
    run = RunDirectory.create(tmp_path / "runs", config)
    objects = Objects.open(run.home_store)
    create, left = objects.create, iter(range(created))

    def cut(key: str, data: bytes) -> None:
        if next(left, None) is None:
            raise CutShort(key)
        create(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(objects, "create", cut)
        if created < 4:  # config, tokenizer, its config and their index
            with pytest.raises(CutShort):
                keep_tokenizer(run, objects)
        else:
            keep_tokenizer(run, objects)
    keep_tokenizer(run, objects)
    kept = kept_companions(objects, config.stages[0].name)
    assert objects.head(index_key(config.stages[0].name)) is not None
    assert config_from_huggingface(json.loads(kept["config.json"])).vocab_size == MODEL["vocab_size"]
    assert kept["tokenizer.json"] == run.tokenizer.read_bytes()


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("words.json", r"cannot read tokenizer .*words\.json"),
        ("words", r"'words' is not of the form package\.module:name"),
        ("own_words:absent", "own_words has no absent"),
        ("own_words:number", "is not a function"),
        ("own_words:wrong", r"returned a str[\s\S]*must return a rollmill\.Tokenizer"),
        ("large.json", r"has 320 tokens, but model\.vocab_size is 300[\s\S]*at least 320"),
    ],
)
def test_a_tokenizer_that_cannot_be_used(
    setting: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_words.py").write_text("number = 3\ndef wrong(size): return 'words'\n")
    chat_tokenizer(SPECIAL_TOKENS, size=320).save(tmp_path / "large.json")
    place = tmp_path / setting if setting.endswith(".json") else setting
    config = make_config(f"tokenizer={place}", "model.vocab_size=300")
    with pytest.raises(ConfigError, match=complaint):
        check_tokenizer(config)  # before anything starts, if it can be known
        make_tokenizer(config)
    sys.modules.pop("own_words", None)
