"""What an engine and SGLang's processes tell each other of an update comes back whole, and names the right bucket."""

from rlpipe.shared.weights import TensorSpec, WeightBucket, WeightGroup
from rollout.weights.engine_groups import EngineWeightGroups
from rollout.weights.update_messages import Answer, RankAnswer, group_of, group_text, plan_fields, plan_of

PLAN = (
    WeightBucket((TensorSpec("embedding", "bfloat16", (7, 3)), TensorSpec("norm", "float32", (3,))), 4),
    WeightBucket((TensorSpec("bias", "float32", ()),)),
    WeightBucket((TensorSpec("", "bfloat16", (2, 0)), TensorSpec("head", "float8_e4m3fn", (7, 3)))),
)


def test_a_plan_comes_back_as_it_was_whatever_tensors_are_called():
    assert plan_of(*plan_fields(PLAN)) == PLAN


def test_a_group_comes_back_without_its_key():
    group = WeightGroup("weights", ("10.0.0.1",), 80, (0, 4), 6, "nccl", 2**30)
    keyed = WeightGroup("weights", ("10.0.0.1",), 80, (0, 4), 6, "nccl", 2**30, b"secret")
    assert group_of(group_text(keyed)) == group
    assert "secret" not in group_text(keyed)


def test_a_plan_whose_counts_do_not_fit_is_not_taken():
    names, dtypes, shapes = plan_fields(PLAN)
    try:
        plan_of(names[:-1], dtypes, shapes)
    except ValueError:
        return
    raise AssertionError("a name was lost without a word")


def test_checksums_of_agreeing_ranks_are_theirs():
    answer = Answer((RankAnswer(("a", "b", "c")), RankAnswer(("a", "b", "c"))))
    assert Answer.of_text(answer.as_text()) == answer
    assert (answer.checksums, answer.failure, answer.disagreement) == (("a", "b", "c"), "", "")


def test_ranks_that_disagree_name_the_bucket_and_what_each_has():
    answer = Answer((RankAnswer(("a", "b", "c")), RankAnswer(("a", "b", "x"))))
    again = Answer.of_text(answer.as_text())
    assert "bucket 2 (CRC-32: rank 0 c, rank 1 x)" in again.disagreement


def test_a_failure_names_its_rank_and_a_single_rank_goes_without():
    two = Answer((RankAnswer(("a",)), RankAnswer(failure="bucket 1, which starts with 'head': ValueError: x")))
    assert Answer.of_text(two.as_text()).failure == "rank 1: bucket 1, which starts with 'head': ValueError: x"
    assert Answer((RankAnswer(failure="x"),)).failure == "x"


def test_a_refusal_of_sglang_itself_is_passed_on():
    assert Answer.of_text("weight cache is active").failure == "weight cache is active"
    assert Answer.of_text("").failure


def test_engines_of_one_group_are_readers_one_after_another_and_first_in_groups_of_their_own():
    joined = []

    class Engine:
        class actor:
            class join_weight_group:
                remote = staticmethod(lambda group, reader: joined.append((group, reader)))

    engines = [Engine() for _ in range(3)]
    groups = EngineWeightGroups(None, None, tensor_parallel=2, deadline_seconds=60.0)
    groups.join(["all"], engines)
    groups.join(["a", "b", "c"], engines)
    assert joined == [("all", 0), ("all", 2), ("all", 4), ("a", 0), ("b", 0), ("c", 0)]
