"""The engine's dials. No torch here: configurations are read on machines that have none."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollmill.config import Config

EXACT_KV = "numerics = 'exact' computes with keys and values as the trainer does, and engine.fp8_kv rounds them"


class EngineConfig(Config):
    max_batch: int = Field(
        64,
        gt=0,
        description="Most requests decoded together. Larger raises throughput and the time per token; production "
        "requests may take a rollout's place.",
    )
    max_waiting: int = Field(
        4096,
        gt=0,
        description="Most requests that wait for a place, rollouts and production counted apart. Further ones get "
        "status 429 with Retry-After.",
    )
    block_size: int = Field(16, gt=0, description="Tokens per page of the KV cache. Must divide `cache_tokens`.")
    cache_tokens: int = Field(
        32768,
        gt=0,
        description="Tokens that the KV cache holds, for all requests and sessions together. Larger takes more memory "
        "and recomputes fewer prompts; lower it when the device's memory runs out.",
    )
    prefill_chunk: int = Field(
        512,
        gt=0,
        description="Most prompt tokens processed per decode step. Larger answers long prompts sooner and delays "
        "running requests more.",
    )
    draft_tokens: int = Field(
        0,
        ge=0,
        le=64,
        description="Prompt lookup: most tokens guessed ahead per step, from earlier text of the context, while up to "
        "four requests run. Tokens and log-probs stay those of the model. Larger is faster when answers repeat the "
        "prompt; 0 turns it off.",
    )
    recompute_kv: bool = Field(
        False,
        description="When weights change, running requests compute their context again, and every token follows from "
        "one version alone. Off: they go on with keys and values of older weights, which takes no time.",
    )
    fp8_kv: bool = Field(
        False,
        description="Keep keys and values in FP8: half the memory of bf16, so a GPU holds twice the context, and less "
        "to read per token. Sampled tokens are a little off what the trainer computes, which the mismatch shows.",
    )
    threads: int = Field(1, gt=0, description="CPU threads of one engine. Raise it where cores are idle.")
    poll_seconds: float = Field(
        0.1,
        gt=0,
        description="Seconds between two looks for new weights. Smaller follows sooner and asks the store more often.",
    )
    stream_seconds: float = Field(
        0.1, ge=0, description="Seconds between two parts of a streamed answer, at least. 0 sends every token at once."
    )

    @model_validator(mode="after")
    def _whole_pages(self) -> Self:
        if self.cache_tokens % self.block_size:
            raise ValueError(f"cache_tokens ({self.cache_tokens}) must be a multiple of block_size ({self.block_size})")
        return self
