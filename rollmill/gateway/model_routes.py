"""The routes that clients of the model use, one per dialect. See `rollmill.gateway.dialect`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiohttp import web

from rollmill.errors import GatewayError
from rollmill.gateway.access import Access, given_key
from rollmill.gateway.completions import Ask, Completions
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.dialect import Dialect, Limits
from rollmill.gateway.dialects.openai_chat import OpenAIChat
from rollmill.gateway.metrics import Metrics
from rollmill.gateway.registry import Registry

OPENAI_CHAT = OpenAIChat()


class ModelRoutes:
    """`model_names` returns the names that a request may ask for; the first stands for no name."""

    def __init__(
        self,
        config: GatewayConfig,
        stop_tokens: tuple[int, ...],
        completions: Completions,
        registry: Registry,
        metrics: Metrics,
        access: Access,
        model_names: Callable[[], Sequence[str]],
    ) -> None:
        self._limits = Limits(stop_tokens, config.default_max_tokens, config.max_messages)
        self._completions = completions
        self._registry = registry
        self._metrics = metrics
        self._access = access
        self._model_names = model_names

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation and record its exact tokens.

        Needs: the key of an open session, or a key with the scope production.
        Takes: an OpenAI chat completion; header `x-rollmill-session: ID` names a production conversation.
        Returns: an OpenAI chat completion, or a stream of it; 503 with Retry-After while no engine is alive.
        """
        return await self._answer(request, OPENAI_CHAT)

    async def models(self, request: web.Request) -> web.Response:
        """List the names of models that a request may ask for.

        Needs: nothing.
        Returns: an OpenAI list of models.
        """
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "rollmill"} for name in self._model_names()]
        return web.json_response({"object": "list", "data": listed})

    async def _answer(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._registry.by_key(given_key(http))
        if session is None:
            await self._access.admit(http, "production")
        request = dialect.parse(await http.read(), self._limits)
        self._check_model(request.model)
        if session is None:
            session = self._registry.production(http.headers.get("x-rollmill-session"), request.user, request.messages)
        self._metrics.count("requests_total", traffic=session.facts.traffic)
        return await self._completions.answer(session, Ask(request, dialect, http))

    def _check_model(self, name: str) -> None:
        names = self._model_names()
        if name and name not in names:
            raise GatewayError(
                "there is no model of this name",
                status=404,
                hint=f"one of {', '.join(names[:8])}, or leave it out",
                code="model_not_found",
            )


def dialect_of(path: str) -> Dialect:
    """The dialect in which an error of this path is told."""
    return OPENAI_CHAT
