"""The command `rlpipe`, also as `python -m rlpipe`."""

import signal


def main() -> None:
    """While the command line is imported there is nothing to stop and nothing to say: Ctrl-C ends the process then, as
    SIGTERM does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rlpipe.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
