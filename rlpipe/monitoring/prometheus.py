"""The newest metrics for a Prometheus server to scrape, under the dictionary's names.

`eval/{dataset}/accuracy` of the data set gsm8k becomes `rlpipe_eval_dataset_accuracy{run="...",dataset="gsm8k"}`. A
metric keeps its last value until a row has it again; `rlpipe_iteration` says how far the rows are.
"""

import json
import re
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from rlpipe.config.run import TrackersConfig
from rlpipe.monitoring.metric_dictionary import declaration
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.tracker import SampleRow
from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.errors import ConfigError

_FIELD = re.compile(r"\{(\w+)\}")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9]+")


class Prometheus:
    """Listens from the first row's trackers on until the run ends. `note`: where, for the user.

    The file `prometheus.json` in the run folder names the address too, as a target for Prometheus' `file_sd_configs`.
    """

    def __init__(self, settings: TrackersConfig, run: str, directory: RunDirectory) -> None:
        port, address = settings.prometheus_port or 0, settings.prometheus_address
        self._run = run
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._iteration = Gauge("rlpipe_iteration", "newest iteration", ["run"], registry=self._registry)
        try:
            self._server, self._thread = start_http_server(port, address, self._registry)
        except OSError as error:
            raise ConfigError(
                f"trackers.prometheus_port {port} of {address} cannot be listened at ({error.strerror or error}): give "
                "another port, 0 for a free one, or an address of this machine"
            ) from None
        host = f"[{address}]" if ":" in address else address
        target = f"{host}:{self._server.server_port}"
        self.note = f"prometheus: http://{target}/metrics"
        self._targets = directory.path / "prometheus.json"
        write_atomically(self._targets, json.dumps([{"targets": [target], "labels": {}}]).encode())

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            declared, fields = declaration(name)
            self._gauge(declared.name, f"{declared.meaning} ({declared.unit})").labels(self._run, *fields).set(value)
        self._iteration.labels(self._run).set(iteration)

    def log_samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        """Samples are no time series."""

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._targets.unlink(missing_ok=True)

    def _gauge(self, declared: str, meaning: str) -> Gauge:
        if declared not in self._gauges:
            labels = ["run", *_FIELD.findall(declared)]
            self._gauges[declared] = Gauge(series_name(declared), meaning, labels, registry=self._registry)
        return self._gauges[declared]


def series_name(declared: str) -> str:
    """Of a metric as the dictionary declares it; what stands for a word in braces is the label of that word."""
    return "rlpipe_" + _NOT_IN_NAMES.sub("_", declared).strip("_")
