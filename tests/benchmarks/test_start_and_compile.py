"""What the benchmark of starts reads lies on this machine: hosts with GPUs are often offline."""

from argparse import Namespace
from pathlib import Path

from rlpipe.config.load import load_config

PROJECT = Path(__file__).resolve().parents[2]


def test_its_run_names_no_data_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    from start_and_compile import write_configuration

    sizes = {"layers": 4, "vocabulary": 320, "prompts": 4, "samples": 2, "iterations": 1, "threads": 1}
    options = Namespace(tiny=True, prompt_tokens=24, response_tokens=16, **sizes)
    config = load_config(write_configuration(options, tmp_path))
    sets = [*config.data.train, *config.eval.datasets]
    assert sets
    assert all(Path(one.path).is_file() for one in sets)
