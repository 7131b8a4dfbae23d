"""Agent sessions without gateway, engine or machine: a SIMULATION for benchmarks that measure only what is learnt.

The tools return the harness's own texts. A small evaluator of expressions replaces Python, so code outside the language
of the micro-repositories counts as wrong. All sessions of a batch advance by one token at a time.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmill.chat.format import ChatFormat, Tool, message_calls
from rollmill.demo.micro_repos import MAIN, Repository
from rollmill.environments.harnesses import tools
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder

MAX_TURNS, MAX_ANSWER, MAX_CONTEXT = 8, 24, 192


_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}


def _value(node: ast.expr, x: int) -> int:
    """The expression's value. Raises KeyError or TypeError for anything these tasks do not need."""
    if isinstance(node, ast.Name) and node.id == "x":
        return x
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, x), _value(node.right, x))
    raise TypeError(f"not evaluated: {ast.dump(node)}")


def call_f(source: str, x: int) -> int | str | None:
    """The result of f(x) of main.py, or the error text that a test run would show."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        return f"error SyntaxError line {getattr(error, 'lineno', 1)}"
    function = body[0] if body else None
    if not isinstance(function, ast.FunctionDef):
        return "error ImportError line 1"
    for statement in function.body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            try:
                return _value(statement.value, x)
            except (KeyError, TypeError, ZeroDivisionError) as error:
                return f"error {type(error).__name__} line {statement.lineno}"
    return None


@dataclass
class Sandbox:
    """The file of one episode, and the tools that read and change it."""

    repository: Repository
    main: str
    done: bool = False

    def answer(self, name: str, arguments: str) -> str:
        try:
            values = tools.parse_arguments(name, arguments)
            if name == "done":
                self.done = True
            if name == "run":
                return self._run()
            if "path" in values and values["path"] != MAIN:
                return tools.ERROR_NO_FILE
            if name == "read":
                return tools.render_read(self.main)
            if name == "edit":
                self.main = tools.apply_edit(self.main, values["line"], values["text"])
            if name == "write":
                self.main = values["content"]
        except tools.BadToolCall as error:
            return error.text
        return tools.OK

    def _run(self) -> str:
        x = self.repository.visible
        value = call_f(self.main, x)
        if isinstance(value, str):
            return value
        return tools.OK if value == self.repository.function.value(x) else self.repository.failure

    def solved(self) -> bool:
        return all(call_f(self.main, x) == self.repository.function.value(x) for x in self.repository.hidden)


@dataclass
class Episode:
    """One session. Each step of the batch appends one token: from `queue` (given) or sampled."""

    sandbox: Sandbox
    queue: list[int]
    tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # positions
    logprobs: list[float] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # of every token that was an input
    answer_start: int = 0
    turns: int = 0
    over: bool = False
    reward: float = 0.0


class LockstepAttention:
    """Attention for sequences that are all at the same position, with a plain tensor as cache."""

    def __init__(self, config: ModelConfig, batch: int) -> None:
        shape = (config.layers, batch, config.kv_heads, config.max_context, config.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.position = 0

    def __call__(self, layer: int, q_BHD: Tensor, k_BHD: Tensor, v_BHD: Tensor) -> Tensor:
        self.keys[layer, :, :, self.position] = k_BHD
        self.values[layer, :, :, self.position] = v_BHD
        past = self.position + 1
        scores = torch.einsum("bhd,bhtd->bht", q_BHD, self.keys[layer, :, :, :past]) * q_BHD.shape[-1] ** -0.5
        return torch.einsum("bht,bhtd->bhd", scores.softmax(-1), self.values[layer, :, :, :past]).flatten(1)

    def keep(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(1, rows), self.values.index_select(1, rows)


@torch.no_grad()
def play(
    model: Decoder, format: ChatFormat, repositories: Sequence[Repository], *, greedy: bool = False
) -> list[Episode]:
    schemas = tools.tool_schemas()
    episodes = []
    for repository in repositories:
        start = format.render_start([{"role": "user", "content": repository.shape.prompt}], schemas)
        episodes.append(Episode(Sandbox(repository, repository.main), start))
    live, cache = list(episodes), LockstepAttention(model.config, len(episodes))
    logprobs_BV = torch.zeros(len(episodes), model.config.vocab_size)
    while live and cache.position < MAX_CONTEXT:
        draws = logprobs_BV.argmax(-1) if greedy else torch.multinomial(logprobs_BV.exp(), 1).squeeze(1)
        chosen = logprobs_BV.gather(1, draws[:, None]).squeeze(1).tolist()
        for episode, token, logprob in zip(live, draws.tolist(), chosen, strict=True):
            _feed(episode, token, logprob, format, schemas)
        still = [index for index, episode in enumerate(live) if not episode.over]
        if len(still) < 0.75 * len(live) or not still:
            live = [live[index] for index in still]
            cache.keep(torch.tensor(still, dtype=torch.long))
            if not live:
                break
        tokens = torch.tensor([episode.tokens[-1] for episode in live])
        output = model(tokens, torch.full_like(tokens, cache.position), cache)
        cache.position += 1
        logprobs_BV = torch.log_softmax(model.logits(output.hidden), -1)
        assert output.routes is not None
        for episode, routes in zip(live, output.routes.numpy().astype(np.uint8), strict=True):
            episode.routes.append(routes)
    for episode in episodes:
        episode.reward = float(episode.sandbox.solved())
    return episodes


def _feed(episode: Episode, token: int, logprob: float, format: ChatFormat, schemas: list[Tool]) -> None:
    """Append the next token. At the end of an answer, run its calls and queue their results."""
    if episode.over:
        return
    if episode.queue:
        episode.tokens.append(episode.queue.pop(0))
        episode.answer_start = len(episode.tokens)
        return
    episode.sampled.append(len(episode.tokens))
    episode.logprobs.append(logprob)
    episode.tokens.append(token)
    if token not in format.stop_tokens:
        episode.over = len(episode.tokens) - episode.answer_start >= MAX_ANSWER
        return
    calls = message_calls(format.parse(episode.tokens[episode.answer_start :], schemas))
    results = [{"role": "tool", "content": episode.sandbox.answer(name, arguments)} for name, arguments in calls]
    episode.turns += 1
    episode.over = episode.sandbox.done or not calls or episode.turns >= MAX_TURNS
    episode.queue = format.render_turn(results, schemas, answer_closed=True)
