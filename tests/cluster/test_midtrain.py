"""The files that mid-training keeps before the first version. The next start completes an interrupted one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmill.cluster.roles.midtrain import make_tokenizer
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.models.huggingface.config import config_from_huggingface
from rollmill.storage.objects import Objects
from rollmill.weights.files.companions import index_key, kept_companions

MODEL = {"vocab_size": 300, "layers": 1, "width": 64}


class CutShort(Exception):
    pass


@pytest.mark.parametrize("created", [0, 1, 2, 3, 4])
def test_an_interrupted_start_is_completed_by_the_next(
    created: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate({"name": "demo", "steps": 0, "model": MODEL, "midtrain": {"steps": 1}})
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
                make_tokenizer(run, objects)
        else:
            make_tokenizer(run, objects)
    make_tokenizer(run, objects)
    kept = kept_companions(objects, config.base_line)
    assert objects.head(index_key(config.base_line)) is not None
    assert config_from_huggingface(json.loads(kept["config.json"])).vocab_size == MODEL["vocab_size"]
    assert kept["tokenizer.json"] == run.tokenizer.read_bytes()
