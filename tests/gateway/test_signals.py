"""What users say about answers, from the gateway to the tokens that learn. Gateway, store and database are real."""

from __future__ import annotations

import time

from rollmill.feedback.collect import Conversations
from rollmill.feedback.distil import distil
from rollmill.feedback.rule import RuleConfig
from rollmill.training.rl.answer_credit import answer_advantages
from tests.gateway.conftest import LIVE, USER, Answers, Mill
from tests.gateway.stand_in import StandIn
from tests.gateway.test_feedback import give
from tests.gateway.test_sessions import user

TRAIN = {"x-rollmill-consent": "train"}


async def test_a_refused_answer_and_its_accepted_retry_learn_each_by_its_own_signal(
    mill: Mill, answers: Answers
) -> None:
    script = ["look at the file", "it is broken, sorry", "it is mended now", "and thanks"]
    engine = StandIn([answers.text(text) for text in script])
    door = await mill.gateway(await mill.engine(engine))
    named = {**TRAIN, "x-rollmill-session": "chat"}
    first = await door.say(LIVE, [USER], headers=named)
    history = [USER, {"role": "assistant", "content": script[0]}, user("go on")]
    refused = await door.say(LIVE, history, headers=named)
    accepted = await door.say(LIVE, history, headers=named)
    for reply, kind in ((refused, "retried"), (accepted, "accepted")):
        (answer,) = reply["rollmill"]["answers"]
        assert (await give(door, {"answer": answer, "kind": kind, "value": 1.0}))[0] == 200
    trajectory = first["rollmill"]["trajectory"]
    for number in range(8):  # a population to compare with
        other = (await door.say(LIVE, [user(f"question {number}")], headers=TRAIN))["rollmill"]
        told = {"answer": other["answers"][0], "kind": "accepted", "value": float(number < 4)}
        assert (await give(door, told))[0] == 200
        await door.seal(other["trajectory"])
    await door.seal(trajectory)
    found = Conversations(mill.database(), "run", settle_s=60.0)
    found.look(time.time() + 1.0)
    rewards = distil(found.found, lambda line, number: 0, RuleConfig(), 0).rewards
    door.trajectories.grade(trajectory, rewards[trajectory])
    made = door.trajectories.load(trajectory)
    learnt = {}
    for segment, advantages in zip(made.segments, answer_advantages(made.segments, made.rewards[-1][1]), strict=True):
        learnt |= {f"{segment.id}/{span.answer}": float(advantages[span.start]) for span in segment.spans}
    values = [learnt[reply["rollmill"]["answers"][0]] for reply in (first, refused, accepted)]
    assert values == [0.0, -1.0, 0.5], "nobody said anything about the first answer"
