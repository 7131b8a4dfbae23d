"""One agent per framework: it has the tool `bash`, and prints the model's last answer.

argv: the framework, the gateway's URL, a key. It runs in the environment of frameworks.txt, not in the project's.
"""

from __future__ import annotations

import sys

URL, KEY = sys.argv[2:]
V1 = f"{URL}/v1"
PROMPT = "Look."


def bash(command: str) -> str:
    """Run a command.

    Args:
        command: what to run
    """
    return f"ran {command}"


def langchain_openai(responses: bool = False) -> str:
    from langchain_openai import ChatOpenAI

    return _langchain(ChatOpenAI(model="rollmill", base_url=V1, api_key=KEY, use_responses_api=responses))


def langchain_responses() -> str:
    return langchain_openai(responses=True)


def langchain_anthropic() -> str:
    from langchain_anthropic import ChatAnthropic

    return _langchain(ChatAnthropic(model="rollmill", base_url=URL, api_key=KEY, max_tokens=1000))


def _langchain(model) -> str:  # type: ignore[no-untyped-def]
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    messages, bound = [HumanMessage(PROMPT)], model.bind_tools([tool(bash)])
    while (answer := bound.invoke(messages)).tool_calls:
        results = [ToolMessage(bash(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        messages += [answer, *results]
    return answer.text if isinstance(answer.text, str) else answer.text()


def openai_agents() -> str:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIResponsesModel("rollmill", AsyncOpenAI(base_url=V1, api_key=KEY))
    agent = Agent("looker", instructions="Be brief.", model=model, tools=[function_tool(bash)])
    return str(Runner.run_sync(agent, PROMPT).final_output)


def pydantic_ai() -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("rollmill", provider=OpenAIProvider(base_url=V1, api_key=KEY))
    return str(Agent(model, tools=[bash]).run_sync(PROMPT).output)


def smolagents() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("rollmill", api_base=V1, api_key=KEY)
    return str(ToolCallingAgent([tool(bash)], model, verbosity_level=0).run(PROMPT))


if __name__ == "__main__":
    print(globals()[sys.argv[1]]())
