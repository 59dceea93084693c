"""Agents of libraries from PyPI, unmodified, in front of a model that is served by OpenAI's API."""

from rlpipe.agents.agent_task import AgentTask


def with_smolagents(task: AgentTask, steps: int = 4) -> dict:
    from smolagents import OpenAIServerModel, Tool, ToolCallingAgent

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

    model = OpenAIServerModel(model_id=task.model, api_base=task.base_url, api_key=task.api_key)
    agent = ToolCallingAgent(tools=[Add()], model=model, max_steps=steps, verbosity_level=0)
    answer = agent.run(str(task.prompt))
    return {"answer": str(answer)}


async def with_openai_agents(task: AgentTask, steps: int = 4) -> dict:
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

    @function_tool
    def add(first: int, second: int) -> int:
        """Adds two numbers."""
        return first + second

    model = OpenAIChatCompletionsModel(task.model, task.client())
    agent = Agent("adder", instructions="Add with the tool.", model=model, tools=[add])
    result = await Runner.run(agent, str(task.prompt), max_turns=steps, run_config=RunConfig(tracing_disabled=True))
    return {"answer": str(result.final_output)}
