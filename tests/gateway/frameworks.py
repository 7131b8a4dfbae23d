"""One agent per framework: it has the tool `bash`, and prints the model's last answer.

argv: the framework, the gateway's URL, a key. It runs in an environment of its own.
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


def pydantic_ai_anthropic() -> str:
    from anthropic import AsyncAnthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY))
    return str(Agent(AnthropicModel("rollmill", provider=provider), tools=[bash]).run_sync(PROMPT).output)


def llama_index() -> str:
    import asyncio

    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike("rollmill", api_base=V1, api_key=KEY, is_chat_model=True, is_function_calling_model=True)

    async def look() -> str:
        return str(await FunctionAgent(tools=[bash], llm=model, streaming=False).run(PROMPT))

    return asyncio.run(look())


def inspect_ai() -> str:
    import asyncio

    from inspect_ai.model import ChatMessageUser, get_model
    from inspect_ai.tool import tool

    @tool(name="bash")
    def shell():  # type: ignore[no-untyped-def]
        async def execute(command: str) -> str:
            """Run a command.

            Args:
                command: what to run
            """
            return bash(command)

        return execute

    async def look() -> str:
        model = get_model("anthropic/rollmill", base_url=URL, api_key=KEY)
        _, output = await model.generate_loop([ChatMessageUser(content=PROMPT)], tools=[shell()])
        return output.completion

    return asyncio.run(look())


def instructor() -> str:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Looked(BaseModel):
        files: list[str]

    client = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY))
    asked = {"model": "rollmill", "messages": [{"role": "user", "content": PROMPT}]}
    return client.create(response_model=Looked, **asked).files[0]


def smolagents() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("rollmill", api_base=V1, api_key=KEY)
    return str(ToolCallingAgent([tool(bash)], model, verbosity_level=0).run(PROMPT))


if __name__ == "__main__":
    print(globals()[sys.argv[1]]())
