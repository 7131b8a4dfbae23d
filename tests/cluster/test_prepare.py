"""The files that a run keeps before its first version. The next start completes an interrupted one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.cluster.prepare import keep_tokenizer
from rollmill.cluster.run import RunDirectory
from rollmill.models.huggingface.config import config_from_huggingface
from rollmill.storage.objects import Objects
from rollmill.weights.files.companions import index_key, kept_companions
from tests.cluster.checkpoints import chat_tokenizer
from tests.cluster.conftest import make_config

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
