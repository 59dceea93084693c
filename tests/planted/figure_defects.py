"""Defects of grades, of rows that are read again, and of figures in plans, reports and metrics."""

from planting import Defect

_EQUIVALENCE = "rewards/test_equivalence.py::"
_GRADERS = "rewards/test_other_graders.py::"
_AT_LEAST = _GRADERS + "test_more_than_the_least_number_is_right_too"
_MAPPING = "rlpipe/test_data_mapping.py::"
_OTHER_ROWS = _MAPPING + "test_another_limit_or_argument_of_the_template_makes_them_anew"
_DISK = "plan/test_plan_command.py::test_a_disk_holds_the_new_checkpoint_beside_those_that_are_kept_and_all_policies"
_OWN_SAMPLING = "rlpipe/test_config.py::test_an_evaluation_set_of_its_own_sampling_counts_for_the_engines"
_OTHER_EXPERIMENT = "rlpipe/test_opening.py::test_settings_that_make_another_experiment_are_refused_unless_allowed"

FIGURES = [
    Defect(
        "every sign of a currency is a dollar's",
        "rewards/answers/plain.py",
        '_UNIT_NAMES[match["currency"][-1]]',
        '"dollar"',
        _EQUIVALENCE + "test_money_is_the_same_by_sign_and_by_word_and_each_currency_its_own",
    ),
    Defect(
        "the value of another name is an answer",
        "rewards/answers/equivalence.py",
        'if named_answer and named_label and named_answer["name"] == named_label["name"]:',
        "if named_answer and named_label:",
        _EQUIVALENCE + "test_a_value_of_another_name_is_another_answer",
    ),
    Defect(
        "a fraction is no answer to its rounded label",
        "rewards/answers/equivalence.py",
        " or _rounds_to(left, right) or _rounds_to(right, left)",
        " or _rounds_to(right, left)",
        _EQUIVALENCE + "test_a_fraction_answers_its_rounded_label",
    ),
    Defect(
        "a unit over a unit is one unit alone",
        "rewards/answers/plain.py",
        'if not known or "per" in words or "/" in plain or "frac" in words:',
        "if not known:",
        _EQUIVALENCE + "test_a_unit_over_a_unit_is_its_abbreviation",
    ),
    Defect(
        "f1 is correct beyond its threshold only",
        "rewards/text.py",
        "Reward(best, best >= threshold, f",
        "Reward(best, best > threshold, f",
        _GRADERS + "test_f1_is_correct_from_its_threshold_on",
    ),
    *(
        Defect(
            f"as many {what} as are asked for, and no more",
            "rewards/ifeval_checks.py",
            f">= {argument}\n",
            f"== {argument}\n",
            _AT_LEAST,
            only=argument.removeprefix("num_").removesuffix("s"),
        )
        for what, argument in (
            ("placeholders", "num_placeholders"),
            ("highlights", "num_highlights"),
            ("sections", "num_sections"),
        )
    ),
    Defect(
        "a label in words is the option of its first letter",
        "rewards/choice.py",
        'if letter is not None and (len(label.strip()) <= len("(A)") or label not in choices):',
        "if letter is not None:",
        _GRADERS + "test_a_label_in_words_that_begins_like_a_letter_is_one_of_the_choices",
    ),
    Defect(
        "code of the thinking is the answer",
        "rewards/code.py",
        "last_code_block(after_thinking(response))",
        "last_code_block(response)",
        _GRADERS + "test_code_of_the_thinking_is_no_answer",
    ),
    Defect(
        "rows of another limit are read from the cache",
        "rlpipe/data/mapped_rows.py",
        "        json.dumps(encoder.limits),\n",
        "",
        _OTHER_ROWS,
    ),
    Defect(
        "rows of other arguments of the template are read from the cache",
        "rlpipe/data/mapped_rows.py",
        "        json.dumps(encoder.template_arguments),\n",
        "",
        _OTHER_ROWS,
    ),
    Defect(
        "a file that was corrected is read from the cache",
        "rlpipe/data/row_files.py",
        "{stat.st_size} {stat.st_mtime_ns}",
        "{stat.st_size}",
        _MAPPING + "test_a_file_that_is_corrected_in_place_is_read_anew",
    ),
    Defect(
        "a plan's disk has no room for the newest checkpoint",
        "rlpipe/estimate/memory.py",
        "config.checkpoint.keep + 1 if",
        "config.checkpoint.keep if",
        _DISK,
    ),
    Defect(
        "a plan's disk has no room for the last policy",
        "rlpipe/estimate/memory.py",
        '"every": checkpoints + 1}',
        '"every": checkpoints}',
        _DISK,
    ),
    Defect(
        "a plan's first stage has no embedding",
        "rlpipe/estimate/parameters.py",
        "return stage + embedding_parameters(shape)",
        "return stage",
        "plan/test_plan_command.py::test_a_first_stage_has_the_embedding_and_activations_of_a_pack_for_each_stage",
    ),
    Defect(
        "a plan has every engine compute all prompts",
        "rlpipe/estimate/seconds.py",
        "lengths.prompt_tokens, computed) / engines",
        "lengths.prompt_tokens, computed)",
        "plan/test_plan_command.py::test_engines_share_the_prompts",
    ),
    Defect(
        "the head of a prediction layer is not computed again",
        "rlpipe/flops/hardware.py",
        "shape.head_flops * (1 + len(mtp_layers)) * sum(lengths)",
        "shape.head_flops * sum(lengths)",
        "rlpipe/test_flops_hardware.py::test_the_head_of_a_prediction_layer_is_recomputed_too",
    ),
    Defect(
        "responses of an iteration that is made again are kept twice",
        "rlpipe/monitoring/trackers.py",
        "(directory.metrics, directory.samples, directory.episodes, directory.responses)",
        "(directory.metrics, directory.samples, directory.episodes)",
        "rlpipe/test_opening.py::test_no_file_of_rows_keeps_an_iteration_that_is_made_again",
    ),
    Defect(
        "engines have no room for the answers of an evaluation set",
        "rlpipe/config/root.py",
        "max(self.longest_training_response_tokens, default, *evaluated)",
        "max(self.longest_training_response_tokens, default)",
        _OWN_SAMPLING,
    ),
    Defect(
        "engines cannot see the stop strings of an evaluation set",
        "rlpipe/config/root.py",
        " + [one.sampling.stop for one in self.eval.datasets]",
        "",
        _OWN_SAMPLING,
    ),
    Defect(
        "a resumed run takes other settings of engines in silence",
        "rlpipe/config/changes.py",
        '    "rollout.engine.tensor_parallel",\n',
        '    "rollout.engine",\n',
        _OTHER_EXPERIMENT,
    ),
    Defect(
        "a resumed run takes other evaluation sets in silence",
        "rlpipe/config/changes.py",
        '    "eval.interval_iterations",\n',
        '    "eval",\n',
        _OTHER_EXPERIMENT,
    ),
    Defect(
        "compared runs have seconds of iterations that trained nothing",
        "rlpipe/monitoring/report/comparison.py",
        "seconds / len(run.trained) for phase",
        "seconds / len(run.rows) for phase",
        "rlpipe/test_run_commands.py::test_phases_of_compared_runs_are_means_of_their_trained_iterations",
    ),
    Defect(
        "a kernel's seconds are those of its last compilation",
        "rlpipe/monitoring/report/page.py",
        'seconds[kernel] += event["seconds"]',
        'seconds[kernel] = event["seconds"]',
        "rlpipe/test_report_page.py::test_seconds_of_a_kernel_are_those_of_all_workers_and_iterations",
    ),
    Defect(
        "groups of equal rewards are told as a share of the samples",
        "rlpipe/monitoring/report/advice.py",
        'groups = means.get("advantage/groups_count", 0.0)',
        'groups = means.get("rollout/samples_count", 0.0)',
        "rlpipe/test_report_chart.py::test_groups_of_equal_rewards_are_told_as_a_share_of_the_groups",
    ),
]
