"""Files that come with rlpipe beside its code: configurations, scripts, pinned packages, cards and records.

In a checkout they lie in its root. A wheel holds them in `rlpipe/bundled` under the same names (setup.py).
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_BUNDLED = _PACKAGE / "bundled"

ROOT = _BUNDLED if _BUNDLED.is_dir() else _PACKAGE.parent
CONFIGS = ROOT / "configs"
MODELS = CONFIGS / "models"
CLUSTERS = CONFIGS / "clusters"
REQUIREMENTS = ROOT / "requirements"
SCRIPTS = ROOT / "scripts"
CARDS = ROOT / "cards"
RECORDS = ROOT / "benchmarks" / "results"
