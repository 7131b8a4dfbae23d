"""Two turns with a client that openapi-python-client generated: a system message, five tools, the result of a tool.

argv: the gateway's URL, a key. Prints the last answer.
"""

from __future__ import annotations

import json
import sys

from rollmill_client import AuthenticatedClient, models
from rollmill_client.api.default import chat

client = AuthenticatedClient(base_url=sys.argv[1], token=sys.argv[2])
value = models.ParametersProperties.from_dict({"value": {"type": "string"}})
parameters = models.Parameters(type_="object", properties=value)
tools = [
    models.ChatTool(type_="function", function=models.Function(name=f"tool_{number}", parameters=parameters))
    for number in range(5)
]
messages = [
    models.InputMessage(role=models.InputMessageRole.SYSTEM, content="Be brief."),
    models.InputMessage(role=models.InputMessageRole.USER, content="Look."),
]
while True:
    response = chat.sync_detailed(client=client, body=models.ChatBody(messages=messages, tools=tools))
    assert response.status_code == 200, response.content
    answer = json.loads(response.content)["choices"][0]["message"]
    if not answer.get("tool_calls"):
        break
    messages.append(models.AssistantMessage.from_dict(answer))
    for call in answer["tool_calls"]:
        messages.append(models.ToolMessage(role="tool", tool_call_id=call["id"], content="ok"))
print(answer["content"])
