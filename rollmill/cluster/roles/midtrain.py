"""Mid-train the base line from random weights to its last step; nothing to do if it is there."""

from __future__ import annotations

from rollmill.chat.formats.compact import SPECIAL_TOKENS, CompactFormat
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.cluster.local import TERMINATED
from rollmill.cluster.run import RunDirectory
from rollmill.environments.tasks.demonstrations import Demonstrations, tokenizer_texts
from rollmill.storage.objects import Objects
from rollmill.training.loop import Trainer
from rollmill.training.objectives.midtrain import MidtrainObjective
from rollmill.weights.store import WeightStore

TOKENIZER_SESSIONS = 2000  # generated sessions the vocabulary is learnt from


def main(run: RunDirectory) -> None:
    config = run.config
    objects = Objects.open(run.home_store)
    tokenizer = make_tokenizer(run, objects)
    objective = MidtrainObjective(
        config.midtrain,
        Demonstrations(CompactFormat(tokenizer), tokenizer),
        seed=config.seed,
        max_context=config.model.max_context,
        tokens_per_microbatch=config.midtrain.training.tokens_per_microbatch,
    )
    trainer = Trainer(
        config.midtrain.training,
        config.model,
        objective,
        WeightStore(objects),
        objects,
        config.base_line,
        steps=config.midtrain.steps,
        seed=config.seed,
    )
    trainer.run(config.midtrain.steps)
    if trainer.step < config.midtrain.steps:
        raise SystemExit(TERMINATED)


def make_tokenizer(run: RunDirectory, objects: Objects) -> Tokenizer:
    """The vocabulary the weights are made for, so it lies beside them in the store: learnt once, never again."""
    key = f"tokenizers/{run.config.base_line}.json"
    if objects.head(key) is None:
        texts = tokenizer_texts(TOKENIZER_SESSIONS)
        Tokenizer(train_tokenizer(texts, run.config.model.vocab_size, SPECIAL_TOKENS)).save(run.tokenizer)
        objects.create(key, run.tokenizer.read_bytes())
    run.tokenizer.write_bytes(objects.get(key))
    return Tokenizer.load(run.tokenizer)
