"""The endpoint for Prometheus: names and labels of the dictionary, where it listens, and that it ends."""

import socket

import pytest
from prometheus_scrape import scraped

from rlpipe.config.run import TrackersConfig
from rlpipe.monitoring.metric_dictionary import METRICS, declaration
from rlpipe.monitoring.prometheus import Prometheus, series_name
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.errors import ConfigError


def test_every_declared_metric_has_a_series_of_its_own():
    names = [series_name(name) for name in METRICS]
    assert len(set(names)) == len(names)


def test_a_name_is_declared_with_what_stands_for_its_braces():
    metric, fields = declaration("eval/gsm8k/pass_at_8")
    assert (metric.name, fields) == ("eval/{dataset}/pass_at_{k}", ("gsm8k", "8"))
    assert declaration("train/loss")[1] == ()
    with pytest.raises(KeyError):
        declaration("train/unheard_of")


def test_metrics_are_scraped_and_the_last_value_stays(tmp_path):
    tracker = Prometheus(TrackersConfig(prometheus_port=0), "mine", RunDirectory(tmp_path))
    tracker.log(1, {"train/loss": 0.5, "eval/gsm8k/accuracy": 0.25, "eval/math_500/accuracy": 0.125})
    tracker.log(2, {"train/loss": float("nan")})
    found = scraped(tmp_path)
    assert found["rlpipe_iteration", "mine"] == 2
    assert found["rlpipe_eval_dataset_accuracy", "gsm8k", "mine"] == 0.25
    assert found["rlpipe_eval_dataset_accuracy", "math_500", "mine"] == 0.125
    assert found["rlpipe_train_loss", "mine"] != found["rlpipe_train_loss", "mine"]
    tracker.close(failed=False)
    assert list(tmp_path.iterdir()) == []


def test_it_listens_at_the_loopback_and_a_taken_port_is_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"trackers.prometheus_port {port} of 127.0.0.1 cannot be listened at"):
            Prometheus(TrackersConfig(prometheus_port=port), "mine", RunDirectory(tmp_path))
    tracker = Prometheus(TrackersConfig(prometheus_port=0), "mine", RunDirectory(tmp_path))
    assert tracker.note.startswith("prometheus: http://127.0.0.1:")
    tracker.close(failed=True)
    tracker = Prometheus(TrackersConfig(prometheus_port=0, prometheus_address="127.0.0.2"), "m", RunDirectory(tmp_path))
    assert tracker.note.startswith("prometheus: http://127.0.0.2:")
    tracker.close(failed=True)
    with pytest.raises(ValueError, match="is no IP address"):
        TrackersConfig(prometheus_address="localhost")
