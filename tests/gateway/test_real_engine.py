"""The gateway in front of the embedded engine: the trainer's forward pass gives the recorded log-probs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from rollmill.gateway.config import EngineEndpoint
from rollmill.inference.server import make_app, serving
from rollmill.models.config import ModelConfig
from rollmill.training.batching import TokenRule, check_fits, pack, segment_sequence
from rollmill.training.lineage import Lineage
from rollmill.training.numerics.router_replay import replay_of
from rollmill.training.single import SINGLE
from rollmill.types import Segment
from rollmill.weights.reading.line_follower import Update
from tests.gateway.conftest import USER, Mill
from tests.inference.world import TINY, engine_at, make_model, make_update, trainer_logprobs


async def test_the_trainer_reproduces_the_recorded_log_probs(mill: Mill) -> None:
    config = TINY.model_copy(update={"vocab_size": mill.tokenizer.vocab_size})
    first, second = make_update(1, config), make_update(2, config)
    mill.plan("a")
    async with (
        engine_at(first, model=config) as engine,
        serving(make_app(engine, token="secret"), "127.0.0.1", 0) as runner,
    ):
        host, port = runner.addresses[0][:2]
        async with mill.running(EngineEndpoint(f"http://{host}:{port}", "home", "secret")) as door:
            key = await door.open("a", min_version=1)
            messages: list[Any] = [USER]
            reply = await door.say(key, messages, max_tokens=24, temperature=1.0)
            assert reply["usage"]["completion_tokens"] <= 24
            await engine.apply(second)
            messages.append({"role": "user", "content": "Go on."})
            await door.say(key, messages, max_tokens=100, temperature=1.0)  # long enough to be streamed
            # a prompt that fills the context is told, and leaves nothing in the record
            status, body = await door.ask(key, [{"role": "user", "content": "x " * 4 * config.max_context}])
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            (segment,) = (await door.seal("a")).segments

    one, two = segment.spans
    assert segment.policies == [first.policy, second.policy]
    assert segment.policy[one.start : one.end].tolist() == [0] * (one.end - one.start)
    assert segment.policy[two.start : two.end].tolist() == [1] * (two.end - two.start)
    assert segment.policies[two.oldest_kv_policy] == first.policy  # the cache of the first turn was kept
    assert segment.routes is not None and segment.routes_valid is not None and segment.routes_valid[:-1].all()
    tokens = segment.tokens[: one.end].tolist()
    routes = dict(enumerate(segment.routes[: one.end]))
    expected = trainer_logprobs(make_model(first, config), tokens, routes).numpy()[one.start - 1 :]
    np.testing.assert_allclose(segment.logprobs[one.start : one.end], expected, atol=2e-3)


def assert_trainable(segment: Segment, update: Update, config: ModelConfig) -> None:
    """The trainer trains on every sampled token of the record, and finds its log-prob."""
    masked: Counter[str] = Counter()
    check_fits([segment], config)
    rule = TokenRule(Lineage("main", {"main": 0}), update.policy.number, 0)
    sequence = segment_sequence(segment, 1.0, rule, masked)
    assert sequence is not None and not +masked and len(sequence.targets) == segment.sampled.sum()
    (batch,) = pack([sequence], 10**6)
    logprobs_M = SINGLE.passes.recompute(make_model(update, config), batch, replay_of(batch)).logprobs_M
    np.testing.assert_allclose(logprobs_M.detach().numpy(), segment.logprobs[segment.sampled], atol=2e-3)


async def test_cuts_and_penalties_of_each_dialect_are_recorded_and_trained_on(mill: Mill) -> None:
    config = TINY.model_copy(update={"vocab_size": mill.tokenizer.vocab_size})
    update = make_update(1, config)
    mill.plan("a", "b", "c")
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    asked: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [USER], "min_p": 0.05, "logit_bias": {"5": 2, "6": -100}, **penalties},
        "completions": {"prompt": [3, 4, 5, 6, 5], "top_p": 0.7, **penalties},
        "messages": {"messages": [USER], "top_k": 7},
    }
    async with engine_at(update, model=config) as engine, serving(make_app(engine), "127.0.0.1", 0) as runner:
        host, port = runner.addresses[0][:2]
        async with mill.running(EngineEndpoint(f"http://{host}:{port}", "home")) as door:
            segments = []
            for name, (path, body) in zip("abc", asked.items(), strict=True):
                headers = {"Authorization": f"Bearer {await door.open(name)}"}
                body = {**body, "max_tokens": 20, "temperature": 0.9}
                async with door.http.post(f"{door.url}/v1/{path}", json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                segments += (await door.seal(name)).segments
    chat, completion, message = (segment.spans[0].sampling for segment in segments)
    assert chat.min_p == 0.05 and chat.logit_bias == ((5, 2.0), (6, -100.0)) and chat.repetition_penalty == 1.2
    assert completion.top_p == 0.7 and completion.presence_penalty == 0.5 and message.top_k == 7
    for segment in segments:
        assert segment.kept_sizes is not None and (segment.kept_sizes > 0).tolist() == segment.sampled.tolist()
        assert_trainable(segment, update, config)
