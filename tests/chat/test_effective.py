"""The template of an export writes what training wrote, also for software that knows nothing but the template."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.chat.chat_files import TEMPLATE
from rollmill.chat.effective import effective_template
from rollmill.chat.formats.template import TemplateFormat
from rollmill.cli.weights.files import _as_trained
from tests.chat.published import TOOLS, published, source_of
from tests.chat.test_templates import AGENT, SYSTEM, USER


@pytest.mark.parametrize("name", ["gemma2", "phi-4", "granite3.3", "smollm3"])
def test_tools_calls_and_results_are_in_the_template_that_is_exported(name: str) -> None:
    case = published(name)
    made = effective_template(case.format)
    assert made is not None and made.endswith(source_of(name))
    again = TemplateFormat(case.tokenizer, made, case.format.writer.variables, family=case.format.family)
    for messages in (AGENT, [SYSTEM, *AGENT], [SYSTEM, USER]):
        for tools in ([], TOOLS):
            assert again.render_start(messages, tools) == case.format.render_start(messages, tools)
    can = again.writer.abilities
    assert can.tools and can.calls and can.results and can.system, "it reads as one that writes all of it"


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1"])
def test_a_template_that_writes_everything_stays_as_it_is(name: str) -> None:
    assert effective_template(published(name).format) is None


def test_an_export_has_the_template_of_training(tmp_path: Path) -> None:
    case, path = published("smollm3"), tmp_path / "tokenizer.json"
    case.tokenizer.save(path)
    files = {"tokenizer.json": path.read_bytes(), TEMPLATE: source_of("smollm3").encode()}
    made, told = _as_trained(files)
    assert made[TEMPLATE].decode().endswith(source_of("smollm3")) and "# Tools" in made[TEMPLATE].decode()
    assert "as training did" in told
    assert _as_trained(made)[0][TEMPLATE] == made[TEMPLATE], "exported, imported and exported again"
    assert _as_trained({"config.json": b"{}"}) == ({"config.json": b"{}"}, "")
