"""An agent that plays a chat environment at the endpoint makes the environment's episodes, token for token."""

from pathlib import Path

from random_policy_engine import RandomPolicy

from rlpipe.config.load import load_config
from rlpipe.environments.protocol import Action, Message, Observation, Result, Step, Task, Unattended, shown
from rlpipe.environments.tools import tool_of
from rlpipe.generation.episode_makers import episode_maker
from rlpipe.generation.event_loop import BackgroundLoop
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.sample import Prompt
from rollout.partial_response import PartialResponse
from rollout.requests import SamplingParameters

EPISODES = 20
MOST_TOKENS = 1600
CONFIG = """
base: {demo}
data: {{max_prompt_tokens: 2000}}
rollout: {{max_response_tokens: {tokens}, generate: {{{generate}}}}}
"""
WAYS = {
    "environment": "function: environment, environment: {name: '%s:Talk', format: chat, max_turn_tokens: 150}",
    "agent": "function: agent, environment: null, agent: {run: '%s:talks'}",
}


def look_up(text: str, number: int = 0) -> str:
    """Looks a text up."""
    return f"{text} {number}"


class Talk(Unattended):
    """Says the same whatever the policy says, for five turns, with a reward for each."""

    tools = (tool_of(look_up),)

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("system", "Be brief. 🙂"), Message("user", task.prompt)))

    async def step(self, action: Action, toolbox: object) -> Step:
        self.turns += 1
        said = None if self.turns == 5 else shown(f"turn {self.turns}: Grüße, <|im_end|>")
        return Step(said, 0.25 * self.turns)

    async def result(self) -> Result:
        return Result(1.0, True)


async def talks(task):
    talk, rewards = Talk(), {}
    observation = await talk.reset(Task(task.episode_id, task.prompt, task.label, task.metadata, task.seed))
    messages, tools = [], [tool.schema for tool in talk.tools]
    async with task.client() as client:
        while observation is not None:
            messages += [{"role": one.role, "content": one.content} for one in observation.messages]
            answer = await client.chat.completions.create(
                model=task.model, messages=messages, tools=tools, max_tokens=150
            )
            step = await talk.step(Action("", ()), None)
            rewards[answer.id], observation = step.reward, step.observation
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return {"reward": 1.0, "correct": True, "turn_rewards": rewards}


def played(folder: Path, way: str) -> list:
    demo = Path(__file__).parents[2] / "configs" / "demo" / "grid.yaml"
    file = folder / f"{way}.yaml"
    file.write_text(CONFIG.format(demo=demo, tokens=MOST_TOKENS, generate=WAYS[way] % __name__))
    tokenizer = byte_tokenizer()
    maker, loop = episode_maker(load_config(file, [])), BackgroundLoop("test")
    maker.open(RandomPolicy(tokenizer), tokenizer, 0)
    try:
        made = []
        for number in range(EPISODES):
            text = f"question {number}"
            token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            prompt = Prompt(f"grid/{number}", text, token_ids, "", "grid", {"prompt": text})
            request = PromptRequest(f"g-{number}", "g", prompt, SamplingParameters(MOST_TOKENS))
            made.append(loop.submit(maker.make(request, PartialResponse())))
        return [one.result(60).episode for one in made]
    finally:
        maker.close()
        loop.close()


def test_an_agent_makes_the_episodes_of_the_environment_that_it_plays(tmp_path):
    environment, agent = (played(tmp_path, way) for way in WAYS)
    assert len(environment) == EPISODES
    for (direct,), (served,) in zip(environment, agent, strict=True):
        assert (direct.prompt.token_ids, direct.response_ids) == (served.prompt.token_ids, served.response_ids)
        assert (direct.loss_mask, direct.rollout_logprobs) == (served.loss_mask, served.rollout_logprobs)
        assert direct.versions == served.versions
        spans = [[(turn.start, turn.end, turn.number, turn.reward) for turn in one.turns] for one in (direct, served)]
        assert spans[0] == spans[1] and len(spans[0]) == 5
