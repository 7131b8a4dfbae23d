from __future__ import annotations

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
