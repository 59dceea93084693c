"""How responses are graded."""

from typing import Any

from pydantic import Field

from rlpipe.config.base import Section

GRADER_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HOME",
    "LANG",
    "LC_*",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHON*",
    "RLPIPE_*",
    "SSL_CERT_*",
    "TMPDIR",
    "TOKENIZERS_PARALLELISM",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
)


class GraderConfig(Section):
    """One grader with its options."""

    name: str
    """Registered grader, or `package.module:function`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the grader."""


class RewardConfig(Section):
    """Grading."""

    name: str = "math"
    """Registered grader, an entry of `graders`, or `package.module:function`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the grader."""

    graders: dict[str, GraderConfig] = Field(default_factory=dict)
    """Graders with options under names of your own, for `column` and for `data.*.reward`."""

    column: str | None = None
    """Column of a prompt's row that names its grader: an entry of `graders`, or a registered one. A row without a
    value gets the grader of its data set."""

    workers: int = Field(1, ge=1, le=4096)
    """Grading processes."""

    timeout_seconds: float = Field(10.0, gt=0)
    """Time limit of one response. The grader `remote` has its own option `deadline_seconds`."""

    remote_connections: int = Field(64, ge=1)
    """Requests to grading services at a time."""

    memory_bytes: int = Field(4 * 2**30, ge=2**29)
    """Address space of one grading process; a grader that needs more fails and is counted."""

    environment: list[str] = Field(default_factory=lambda: list(GRADER_ENVIRONMENT))
    """Environment variables that graders see, by name or by pattern with `*`. None of the default holds a secret."""

    score_on_failure: float = 0.0
    """Score of a response whose grading timed out or crashed; such responses are counted."""

    max_failed_share: float = Field(0.5, ge=0, le=1)
    """The run ends when grading timed out or crashed for more than this share of the responses of an iteration, or of
    the answers of an evaluation set."""
