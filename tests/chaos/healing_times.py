"""Prints how fast lost engines are noticed and healed on this machine: `python -m tests.chaos.healing_times`.

One run of two engines and one iteration for each kind of loss, on the CPU engine with a tiny model.
"""

import tempfile
from pathlib import Path

from tests.chaos.chaos_schedule import ROLLOUT, SIGNALS, Strike
from tests.chaos.chaos_support import DisturbedRun, disturbed_run

KINDS = [(victim, how, phase) for phase in ("rollout", "train") for victim in ROLLOUT for how in SIGNALS]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        strikes = [Strike(*kind, iteration, 0.1) for iteration, kind in enumerate(KINDS, start=1)]
        settings = (f"run.iterations={len(KINDS) + 1}", "rollout.engines=2", "rollout.max_response_tokens=160")
        run = disturbed_run(Path(folder) / "run", strikes, *settings, "fault.engine_restarts=50")
    print(table(run))


def table(run: DisturbedRun) -> str:
    """A line for each strike."""
    lines = [f"{'loss':<42}{'noticed after':>15}{'serves after':>15}"]
    for strike in run.strikes:
        fault = run.fault_after(strike)
        if fault is not None:
            noticed, serving = fault["noticed"] - strike["time"], fault["serving"] - strike["time"]
            lines.append(f"{strike['strike']:<42}{noticed:>13.1f} s{serving:>13.1f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
