"""The gateway in front of the embedded engine: the trainer's forward pass gives the recorded log-probs."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollmill.gateway.config import EngineEndpoint
from rollmill.inference.server import make_app, serving
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
