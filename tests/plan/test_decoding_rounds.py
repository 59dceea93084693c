"""Which requests decode at a time when an engine's memory does not hold all of them until their end."""

import math
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from rlpipe.estimate.decoding_rounds import decoding_rounds


@dataclass(frozen=True)
class Case:
    requests: int
    prompt: int
    response: int
    room: int

    def rounds(self):
        return list(decoding_rounds(self.requests, self.prompt, self.response, self.room))

    @property
    def steps(self) -> float:
        return sum(stretch.steps for part in self.rounds() for stretch in part.stretches)


@st.composite
def cases(draw):
    requests, prompt = draw(st.integers(1, 300)), draw(st.integers(0, 4096))
    response = draw(st.integers(1, 32768))
    share = draw(st.floats(0.01, 1.5))
    return Case(requests, prompt, response, max(prompt + response, int(share * requests * (prompt + response))))


def test_requests_that_all_have_room_decode_together_until_their_end():
    (part,) = Case(128, 256, 8192, 128 * 8448).rounds()
    assert (part.requests, part.again) == (128, 0)
    (stretch,) = part.stretches
    assert (stretch.requests, stretch.context_tokens, stretch.steps) == (128, 256 + 4096, 8192)


@given(cases())
def test_every_token_is_decoded_once(case):
    decoded = sum(stretch.requests * stretch.steps for part in case.rounds() for stretch in part.stretches)
    assert math.isclose(decoded, case.requests * case.response, rel_tol=1e-9)


@given(cases())
def test_nothing_takes_back_time(case):
    stretches = [stretch for part in case.rounds() for stretch in part.stretches]
    assert min(stretch.steps for stretch in stretches) >= 0 < min(stretch.requests for stretch in stretches)


def test_requests_whose_prompts_have_no_room_wait_for_others():
    """Ten prompts of 1,000 tokens in room for 4,400: four begin, all of them get 100 tokens, and three all 400."""
    first, second, *_ = Case(10, 1000, 400, 4400).rounds()
    begins, *pieces = first.stretches
    assert (begins.requests, begins.steps, pieces[-1].requests) == (4, 100, 3)
    assert (second.again, second.again_tokens, second.requests) == (1, 1100, 4)
    assert Case(10, 1000, 400, 10**6).rounds()[0].requests == 10


@given(cases())
def test_what_runs_has_room_at_every_time(case):
    for part in case.rounds():
        for stretch in part.stretches:
            at_its_end = stretch.context_tokens + stretch.steps / 2
            assert stretch.requests * at_its_end <= case.room * (1 + 1e-9)


@given(cases(), st.integers(1, 10**6))
@example(Case(requests=4, prompt=3, response=1, room=10), 2)
@example(Case(requests=5, prompt=3556, response=774, room=17319), 3)
def test_more_room_takes_hardly_more_steps(case, more):
    """At most a third: where one more of a few requests runs to its end, those that are left over begin later."""
    roomier = Case(case.requests, case.prompt, case.response, case.room + more)
    assert roomier.steps <= case.steps * 4 / 3 + 1


def test_a_tenth_too_little_room_costs_little_beside_waiting_for_half_of_the_requests():
    """As seen of 128 requests of 8,192 tokens with room for 102: they ran together until 6,400 tokens, and the last 20
    took a twentieth of the time of all."""
    case = Case(128, 256, 8192, 102 * 8448)
    first, second, *_ = case.rounds()
    assert first.stretches[0].steps > 6000 and second.requests == second.again == 26
    assert case.steps < 1.25 * 8192
