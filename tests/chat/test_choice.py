from __future__ import annotations

import json

import pytest

from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.hermes import HermesFormat
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.errors import ConfigError
from tests.chat.conftest import CODE, TOOLS

USER = {"role": "user", "content": "Fix add."}


def test_the_tokenizer_says_which_format(tokenizer: Tokenizer, hermes_tokenizer: Tokenizer) -> None:
    assert format_of(tokenizer).name == "compact"
    assert format_of(hermes_tokenizer).name == "hermes"


@pytest.mark.parametrize("special", [(), ("<|im_start|>",), ("<end>", "<agent>")])
def test_a_tokenizer_of_no_known_format(special: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"no chat template[\s\S]*chat\.template = FILE"):
        format_of(Tokenizer(train_tokenizer(CODE, 300, special)))


def test_tools_stay_out_of_the_prompt_when_asked(hermes_tokenizer: Tokenizer) -> None:
    short, long = format_of(hermes_tokenizer, tools_in_prompt=False), format_of(hermes_tokenizer)
    assert short.render_start([USER], TOOLS) == short.render_start([USER], []) == long.render_start([USER], [])
    assert "<tools>" in hermes_tokenizer.decode(long.render_start([USER], TOOLS))
    system = {"role": "system", "content": "Be brief."}
    assert short.render_start([system, USER], TOOLS) == long.render_start([system, USER], [])
    answer = HermesFormat(hermes_tokenizer).parse(
        hermes_tokenizer.encode('<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'), TOOLS
    )
    assert answer == short.parse(short.render_answer(answer, TOOLS), TOOLS)


LLAMA = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|eot_id|>{% endfor %}[assistant]"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("special", "template", "config", "stops", "begin", "end"),
    [  # as the files of Llama 3.1, SmolLM2, Qwen2.5, DeepSeek and of a model without a template say
        (
            ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
            LLAMA,
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
            [1, 2, 3],
            "<|begin_of_text|>",
            "<|end_of_text|>",
        ),
        (
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            CHATML,
            {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
            2,
            None,
            "<|endoftext|>",
        ),
        (
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            CHATML,
            {"bos_token": None, "add_bos_token": False, "eos_token": "<|im_end|>"},
            [2, 0],
            None,
            "<|endoftext|>",
        ),
        (
            ("<bos>", "<stop>", "<|eot_id|>"),
            LLAMA,
            {"bos_token": {"content": "<bos>"}, "add_bos_token": True, "eos_token": "<stop>"},
            [1, 2],
            "<bos>",
            "<stop>",
        ),
        (("<|im_start|>", "<|im_end|>"), None, {}, None, None, "<|im_end|>"),
    ],
)
def test_documents_begin_and_end_as_texts_do_and_not_as_turns(
    special: tuple[str, ...], template: str | None, config: dict, stops: object, begin: str | None, end: str
) -> None:
    tokenizer = Tokenizer(train_tokenizer(CODE, 300, special))
    files = {"tokenizer_config.json": config | {"chat_template": template}, "generation_config.json": {}}
    if stops is not None:
        files["generation_config.json"] = {"eos_token_id": stops}
    marks = format_of(tokenizer, {name: json.dumps(tree).encode() for name, tree in files.items()}).document
    assert (marks.begin, marks.end) == (begin and tokenizer.token_id(begin), tokenizer.token_id(end))
