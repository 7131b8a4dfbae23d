"""`[chat]`: what the files of a checkpoint do not say about its chat format, or say wrongly."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config import Config, LocalPath

FamilyName = Literal[
    "hermes",
    "qwen-coder",
    "glm",
    "llama3",
    "mistral",
    "granite",
    "deepseek",
    "deepseek-v3",
    "kimi",
    "harmony",
    "cohere",
    "json",
]


class ChatConfig(Config):
    template: LocalPath | None = Field(
        None,
        description="A Jinja file to use as the chat template. Not set: the checkpoint's own; without one, ChatML with "
        "Hermes' tool calls if the tokenizer has its tokens.",
    )
    calls: FamilyName | None = Field(
        None, description="How the model writes tool calls. Not set: found from template and tokenizer."
    )
    variables: dict[str, bool | int | str] = Field(
        {}, description="Variables that the template knows, such as `enable_thinking = false` for Qwen3."
    )

    @property
    def kept(self) -> ChatConfig:
        """The settings of a run that keeps the template beside its tokenizer."""
        return self.model_copy(update={"template": None})
