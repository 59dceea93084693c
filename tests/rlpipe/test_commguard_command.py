"""`rlpipe commguard`, as a user calls it."""

import pytest
from run_support import UNTRACKED, run_arguments, start_command
from typer.testing import CliRunner

from actor.comm_guard.rules import Policy, Rule, Threshold, load_policy, save_policy
from rlpipe.cli import app
from rlpipe.shared.errors import EXIT_CODE


def _shown(*arguments):
    return CliRunner().invoke(app, ["commguard", "show", *map(str, arguments)])


def test_the_default_policy_is_shown_with_every_rule_and_its_evidence():
    lines = _shown().output.splitlines()
    rules = load_policy().rules
    assert len(rules) > 10
    for rule, line in zip(rules, lines[-len(rules) :], strict=True):
        assert line.split()[:2] == [rule.operation, rule.verdict]
        assert line.endswith(" ".join(rule.evidence.split()))


def test_a_policy_file_is_shown_and_what_is_none_is_refused_in_one_sentence(tmp_path):
    rule = Rule(operation="all_reduce", verdict="skip", evidence="measured: 3 calls, 0 MiB in later ones")
    path = tmp_path / "policy.yaml"
    save_policy(Policy(rules=[rule], threshold=Threshold(share=0.07)), path)
    output = _shown(path).output
    assert "all_reduce" in output and "measured: 3 calls" in output and "7.0%" in output
    path.write_text("rules: [{operation: all_reduces, verdict: skip, evidence: x}]")
    for wrong, sentence in ((path, "rules.0.operation"), (tmp_path / "none.yaml", "cannot be read")):
        refused = _shown(wrong)
        assert refused.exit_code == EXIT_CODE
        assert sentence in refused.output and "Traceback" not in refused.output


@pytest.mark.slow
def test_a_profile_without_gpus_trains_and_says_that_nothing_was_measured(tmp_path):
    policy = tmp_path / "guard.yaml"
    settings = run_arguments(tmp_path, *UNTRACKED)
    process = start_command("commguard", "profile", *settings, "--iterations", "2", "--output", str(policy))
    output, _ = process.communicate(timeout=800)
    assert process.returncode == EXIT_CODE, output
    assert "several GPUs" in output and "Traceback" not in output
    assert not policy.exists()
    rows = (tmp_path / "small-commguard" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 1 + 2  # before the first iteration, and after each
