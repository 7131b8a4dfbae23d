"""OpenAI completions: a prompt as text or token ids, without a chat format.

A prompt of token ids is the context of the engine as it is. A text is tokenised without special tokens; a client that
needs them sends ids. Answers have `token_ids` beside the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.errors import GatewayError
from rollmill.gateway.wire.body import parse_object, to_bytes
from rollmill.gateway.wire.dialect import Delta, Identity, Limits, ModelRequest, Reply, TokenLogprob
from rollmill.gateway.wire.dialects import fields, openai
from rollmill.inference.engine import MOST_TOP_LOGPROBS
from rollmill.strict import short

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "return_token_ids": (True, False),  # they are always returned
    "suffix": ("",),
}
_KNOWN = fields.PENALTIES | frozenset(
    "echo logprobs max_tokens model n prompt return_token_ids seed stop stream stream_options temperature top_k top_p"
    " user".split()
)


class OpenAICompletions(openai.OpenAIDialect):
    name = "openai_completions"

    def parse(self, body: bytes, limits: Limits) -> ModelRequest:
        tree = parse_object(body)
        fields.check_names(tree, _KNOWN, _NEUTRAL, ())
        _refuse_echo(tree)
        best = fields.integer(tree, "logprobs", 0, MOST_TOP_LOGPROBS)
        return ModelRequest(
            messages=[],
            tools=[],
            logprobs=best is not None,
            top_logprobs=best or 0,
            prompt=_prompt(tree.get("prompt")),
            **openai.common(tree, limits, "max_tokens"),
            **openai.several(tree),
        )

    def reply(self, reply: Reply) -> bytes:
        choices = []
        for index, answer in enumerate(reply.answers):
            logprobs = _logprobs(reply.request, reply.logprobs[index]) if reply.request.logprobs else None
            text, finish = answer.message["content"] or "", openai.finish_reason(answer)
            choices.append(_choice(index, text, list(answer.tokens), logprobs, finish))
        head = _head(reply.request, reply.identity)
        return to_bytes({**head, "choices": choices, "usage": openai.usage(reply), "rollmill": reply.about})

    def stream(self, request: ModelRequest, identity: Identity) -> TextWriter:
        return TextWriter(request, identity)


class TextWriter(openai.OpenAIWriter):
    def __init__(self, request: ModelRequest, identity: Identity) -> None:
        super().__init__(_head(request, identity))
        self._request = request

    def start(self, prompt_tokens: int) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        logprobs = _logprobs(self._request, delta.logprobs) if self._request.logprobs else None
        choice = _choice(index, delta.text, list(delta.tokens), logprobs, None)
        return fields.event({**self._head, "choices": [choice]})

    def finish(self, reply: Reply) -> bytes:
        events = b""
        for index, answer in enumerate(reply.answers):
            choice = _choice(index, "", [], None, openai.finish_reason(answer))
            events += fields.event({**self._head, "choices": [choice], "rollmill": reply.about})
        return events + self._end(reply)


def _refuse_echo(tree: dict[str, Any]) -> None:
    if fields.field(tree, "echo", bool):
        raise GatewayError(
            "echo is not supported: engines tell no log-probs of a prompt",
            hint="ask for answers only; in lm-eval that are tasks of the kind generate_until",
            code="unsupported_parameter",
        )


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if not all(0 <= token <= fields.LARGEST for token in prompt):
            raise GatewayError("prompt has a token id that is negative or too large")
        return prompt
    raise GatewayError(
        f"prompt must be a text or a list of token ids, got {short(prompt)}",
        hint="send one prompt per request: batch_size=1",
    )


def _head(request: ModelRequest, identity: Identity) -> dict[str, Any]:
    return openai.head(f"cmpl-{identity.id}", "text_completion", request, identity)


def _choice(index: int, text: str, tokens: list[int], logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "token_ids": tokens, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(request: ModelRequest, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "tokens": [each.text for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [_best(each) for each in logprobs] if request.top_logprobs else None,
        "text_offset": None,
    }


def _best(told: TokenLogprob) -> dict[str, float]:
    """The most likely tokens by their text, the sampled one among them. Of tokens with the same text, the most likely
    one counts."""
    best: dict[str, float] = {}
    for text, logprob in (*told.best, (told.text, told.logprob)):
        best.setdefault(text, logprob)
    return best
