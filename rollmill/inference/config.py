"""The engine's dials. No torch here: configurations are read on machines that have none."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollmill.config import Config


class EngineConfig(Config):
    max_batch: int = Field(64, gt=0, description="requests decoded together; production may take a rollout's place")
    block_size: int = Field(16, gt=0, description="positions a page of the KV cache")
    cache_tokens: int = Field(32768, gt=0, description="positions the KV cache holds, for all requests and sessions")
    prefill_chunk: int = Field(512, gt=0, description="prompt tokens a step: more fills faster, less delays decoding")
    threads: int = Field(1, gt=0, description="CPU threads of one product")
    poll_seconds: float = Field(0.1, gt=0, description="how often the store is asked for new weights")
    stream_seconds: float = Field(0.1, ge=0, description="streams send fresh tokens at most this often")

    @model_validator(mode="after")
    def _whole_pages(self) -> Self:
        if self.cache_tokens % self.block_size:
            raise ValueError(f"cache_tokens ({self.cache_tokens}) must be a multiple of block_size ({self.block_size})")
        return self
