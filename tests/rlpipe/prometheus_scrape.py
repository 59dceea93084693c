"""What a Prometheus server would read of a run."""

import json
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families


def scraped(folder: Path) -> dict[tuple[str, ...], float]:
    """(name, label values by the label's name) -> value, by the target that the run folder names."""
    ((target,),) = [one["targets"] for one in json.loads((folder / "prometheus.json").read_text())]
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
