"""Finds the family of a model's tool calls from its template and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.chat.call_families.cohere import ACTION, CohereCalls
from rollmill.chat.call_families.deepseek import CALLS, DeepSeekCalls
from rollmill.chat.call_families.glm import KEY, GlmCalls
from rollmill.chat.call_families.harmony import CHANNEL, HarmonyCalls
from rollmill.chat.call_families.hermes import START, HermesCalls
from rollmill.chat.call_families.kimi import SECTION, KimiCalls
from rollmill.chat.call_families.mistral import MarkedListCalls
from rollmill.chat.call_families.plain_json import JsonCalls
from rollmill.chat.call_families.qwen_coder import QwenCoderCalls
from rollmill.chat.call_family import CallFamily
from rollmill.chat.config import FamilyName
from rollmill.chat.tokenizer import Tokenizer

FAMILIES: Mapping[FamilyName, CallFamily] = {
    "hermes": HermesCalls(),
    "qwen-coder": QwenCoderCalls(),
    "glm": GlmCalls(),
    "llama3": JsonCalls("llama3", key="parameters", single=True),
    "mistral": MarkedListCalls("mistral", "[TOOL_CALLS]"),
    "granite": MarkedListCalls("granite", "<|tool_call|>"),
    "deepseek": DeepSeekCalls(fenced=False),
    "deepseek-v3": DeepSeekCalls(fenced=True),
    "kimi": KimiCalls(),
    "harmony": HarmonyCalls(),
    "cohere": CohereCalls(),
    "json": JsonCalls("json", key="arguments", single=False),
}


def family_of(template: str, tokenizer: Tokenizer) -> CallFamily:
    """What the template writes decides, then the special tokens of the vocabulary."""
    for text in (template, "\n".join(tokenizer.special)):
        if CALLS in text:
            return FAMILIES["deepseek-v3" if "```json" in template else "deepseek"]
        if CHANNEL in text:
            return FAMILIES["harmony"]
        if ACTION in text:
            return FAMILIES["cohere"]
        if SECTION in text:
            return FAMILIES["kimi"]
        if "<function=" in text:
            return FAMILIES["qwen-coder"]
        if KEY in text:
            return FAMILIES["glm"]
        if START in text:
            return FAMILIES["hermes"]
        if "[TOOL_CALLS]" in text:
            return FAMILIES["mistral"]
        if "<|tool_call|>" in text:
            return FAMILIES["granite"]
        if "<|python_tag|>" in text:
            return FAMILIES["llama3"]
    return FAMILIES["json" if "tool_calls" in template else "hermes"]
