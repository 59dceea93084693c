"""Prints how many of the planted defects were seen."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    def planted(outcome: str) -> int:
        reports = terminalreporter.stats.get(outcome, [])
        return sum("test_a_planted_defect_turns_its_test_red" in report.nodeid for report in reports)

    seen, missed = planted("passed"), planted("failed")
    if seen + missed:
        terminalreporter.write_line(f"planted defects: {seen} of {seen + missed} seen")
