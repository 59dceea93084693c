"""An agent of a library from PyPI, in front of a model that is served by OpenAI's API."""

from smolagents import OpenAIServerModel, Tool, ToolCallingAgent

from rlpipe.agents.agent_task import AgentTask


class Add(Tool):
    name = "add"
    description = "Adds two numbers."
    inputs = {
        "first": {"type": "integer", "description": "a number"},
        "second": {"type": "integer", "description": "a number"},
    }
    output_type = "integer"

    def forward(self, first: int, second: int) -> int:
        return first + second


def adder(task: AgentTask, steps: int = 4) -> dict:
    model = OpenAIServerModel(model_id=task.model, api_base=task.base_url, api_key=task.api_key)
    agent = ToolCallingAgent(tools=[Add()], model=model, max_steps=steps, verbosity_level=0)
    answer = agent.run(str(task.prompt))
    return {"answer": str(answer)}
