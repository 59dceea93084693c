"""What ends a command and the user can put right, as one sentence."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from rlpipe.shared import interrupts
from rlpipe.shared.errors import EXIT_CODE, RlpipeError
from rlpipe.shared.secret_text import Secrets

# What the operating system refuses for a reason that only the user can change.
_FIXES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or raise the quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "choose a place that can be written to",
    errno.EACCES: "correct its rights, or choose another place",
    errno.EPERM: "correct its rights, or choose another place",
    errno.ENAMETOOLONG: "choose a shorter one",
    errno.ENOENT: "correct the path, or find out who removed it",
    errno.ENOTDIR: "correct the path",
    errno.EISDIR: "correct the path",
    errno.EEXIST: "remove what stands there, or choose another place",
    errno.ELOOP: "remove that link",
    errno.ENXIO: "correct the path",
    errno.EBUSY: "find out who uses it, or choose another place",
    errno.EIO: "look after the disk, or choose another place",
    errno.ESTALE: "mount it again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


@contextmanager
def one_sentence(debug: bool) -> Iterator[None]:
    """Turn what the user can fix into one sentence and exit code 2, and Ctrl-C into exit code 130."""
    try:
        yield
    except RlpipeError as error:
        if debug:
            raise
        typer.echo(f"error: {Secrets().hide(str(error))}", err=True)
        raise typer.Exit(EXIT_CODE) from None
    except OSError as error:
        if debug or error.errno not in _FIXES:
            raise
        where = str(error.filename)[:200] if error.filename else "a file"
        typer.echo(f"error: {where}: {error.strerror}; {_FIXES[error.errno]}", err=True)
        raise typer.Exit(EXIT_CODE) from None
    except (KeyboardInterrupt, SystemError) as error:
        if isinstance(error, SystemError) and not interrupts.requested():
            raise  # Ray turns an exception that is raised within its callbacks into this one
        typer.echo(f"{interrupts.INTERRUPTED}{error if isinstance(error, KeyboardInterrupt) else ''}", err=True)
        raise typer.Exit(interrupts.INTERRUPTED_EXIT_CODE) from None
