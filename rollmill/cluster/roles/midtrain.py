"""Mid-train the base line from random weights to its last step; nothing to do if it is there."""

from __future__ import annotations

from rollmill.chat.formats.compact import SPECIAL_TOKENS, CompactFormat
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.cluster.run import RunDirectory
from rollmill.environments.tasks.demonstrations import Demonstrations, tokenizer_texts
from rollmill.storage.objects import Objects
from rollmill.training.loop import Trainer
from rollmill.training.objectives.midtrain import MidtrainObjective
from rollmill.weights.store import WeightStore

TOKENIZER_SESSIONS = 2000  # generated sessions the vocabulary is learnt from


def main(run: RunDirectory) -> None:
    config = run.config
    tokenizer = make_tokenizer(run)
    objective = MidtrainObjective(
        config.midtrain,
        Demonstrations(CompactFormat(tokenizer), tokenizer),
        seed=config.seed,
        max_context=config.model.max_context,
        tokens_per_microbatch=config.midtrain.training.tokens_per_microbatch,
    )
    objects = Objects.open(run.home_store)
    Trainer(
        config.midtrain.training,
        config.model,
        objective,
        WeightStore(objects),
        objects,
        config.base_line,
        steps=config.midtrain.steps,
        seed=config.seed,
    ).run(config.midtrain.steps)


def make_tokenizer(run: RunDirectory) -> Tokenizer:
    """The run's vocabulary, learnt from generated sessions: the same for every run of the same vocabulary size."""
    if not run.tokenizer.exists():
        texts = tokenizer_texts(TOKENIZER_SESSIONS)
        Tokenizer(train_tokenizer(texts, run.config.model.vocab_size, SPECIAL_TOKENS)).save(run.tokenizer)
    return Tokenizer.load(run.tokenizer)
