"""Machines that commands are run on: folders in the sandbox of this machine, and machines behind HTTP."""

import asyncio
import base64
import io
import secrets
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from rewards.sandbox.program import Isolation, Limits, run_command

_CONNECT_SECONDS = 30.0
_START_SECONDS = 10.0
_TRIES = 4


@dataclass(frozen=True)
class CommandOutcome:
    """How a command ended. `exit_code` is -1 where it took too long."""

    exit_code: int
    output: str
    timed_out: bool = False


class CommandSandbox(Protocol):
    """A machine of one episode."""

    async def start(self, image: str, files: Mapping[str, str]) -> None:
        """Makes it; `files` are texts by their paths within the working folder. image: what it is made from, where
        there are images."""
        ...

    async def run(self, command: str, seconds: float) -> CommandOutcome:
        """Runs a shell command in the working folder, which keeps what it changes."""
        ...

    async def add(self, files: Mapping[str, str]) -> None:
        """Writes files into the working folder."""
        ...

    async def read(self, path: str) -> str | None:
        """A file of the working folder; None where there is none."""
        ...

    async def stop(self) -> None:
        """Gives it back."""
        ...


class LocalSandbox:
    """A folder that lives between commands as an archive, and is unpacked into a new sandbox for each of them.

    Nothing of a command outlives it but the folder's files, at most `folder_bytes` packed; a command that leaves more
    has changed nothing, which its output says.
    """

    def __init__(self, memory_bytes: int = 2**30, folder_bytes: int = 2**24, isolation: Isolation = "required") -> None:
        self._memory_bytes = memory_bytes
        self._folder_bytes = folder_bytes
        self._isolation: Isolation = isolation
        self._archive = ""

    async def start(self, image: str, files: Mapping[str, str]) -> None:
        self._archive = _packed({}, files)

    async def run(self, command: str, seconds: float) -> CommandOutcome:
        word = secrets.token_hex(16)
        script = (
            "mkdir work && base64 -d archive | tar -C work -xz && cd work || exit 120\n"
            f"timeout -s KILL {seconds:g} sh ../command > ../output 2>&1 < /dev/null; code=$?; cd ..\n"
            f"head -c {self._folder_bytes} output; printf %s {word}; tar -C work -cz . | base64 -w 0; exit $code\n"
        )
        limits = Limits(
            wall_seconds=seconds + _START_SECONDS,
            memory_bytes=self._memory_bytes,
            processes=64,
            file_bytes=4 * self._folder_bytes,
            work_bytes=8 * self._folder_bytes,
            output_bytes=3 * self._folder_bytes,
        )
        files = {"archive": self._archive, "command": command}
        outcome = await asyncio.to_thread(run_command, script, files, limits, self._isolation)
        output, marked, archive = outcome.stdout.rpartition(word)
        timed_out = outcome.timed_out or outcome.exit_code == 137  # killed by `timeout`
        if not marked or len(archive) > self._folder_bytes or not _is_archive(archive):
            told = f"{outcome.stdout[-1000:]}\n[the folder is as before: it could not be kept]"
            return CommandOutcome(-1 if timed_out else outcome.exit_code, told, timed_out)
        self._archive = archive
        return CommandOutcome(-1 if timed_out else outcome.exit_code, output, timed_out)

    async def add(self, files: Mapping[str, str]) -> None:
        self._archive = _packed(_unpacked(self._archive), files)

    async def read(self, path: str) -> str | None:
        found = _unpacked(self._archive).get(_clean(path))
        return None if found is None else found[1].decode("utf-8", errors="replace")

    async def stop(self) -> None:
        self._archive = ""


class HttpSandbox:
    """A machine of a service, which answers JSON at `url`:

    `POST /sandboxes {image, files}` gives `{id}`; `POST /sandboxes/ID/commands {command, seconds}` gives `{exit_code,
    output, timed_out}`; `PUT /sandboxes/ID/files {files}`; `GET /sandboxes/ID/files?path=` gives `{text}` or 404;
    `DELETE /sandboxes/ID`. What cannot be connected to is tried again; a command that was sent is not.
    """

    def __init__(self, url: str, key: str = "", client: httpx.AsyncClient | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = client or httpx.AsyncClient(base_url=url, headers=headers, timeout=_CONNECT_SECONDS)
        self._place = ""

    async def start(self, image: str, files: Mapping[str, str]) -> None:
        made = await self._asked("POST", "/sandboxes", {"image": image, "files": dict(files)})
        self._place = f"/sandboxes/{made.json()['id']}"

    async def run(self, command: str, seconds: float) -> CommandOutcome:
        asked = {"command": command, "seconds": seconds}
        told = (await self._asked("POST", f"{self._place}/commands", asked, seconds + _CONNECT_SECONDS)).json()
        return CommandOutcome(int(told["exit_code"]), str(told["output"]), bool(told.get("timed_out", False)))

    async def add(self, files: Mapping[str, str]) -> None:
        await self._asked("PUT", f"{self._place}/files", {"files": dict(files)})

    async def read(self, path: str) -> str | None:
        try:
            return str((await self._asked("GET", f"{self._place}/files?path={path}")).json()["text"])
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.NOT_FOUND:
                return None
            raise

    async def stop(self) -> None:
        try:
            if self._place:
                await self._asked("DELETE", self._place)
        finally:
            await self._client.aclose()

    async def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, seconds: float = _CONNECT_SECONDS
    ) -> httpx.Response:
        retry = retry_if_exception_type((httpx.ConnectError, httpx.ConnectTimeout))
        async for attempt in AsyncRetrying(
            retry=retry, stop=stop_after_attempt(_TRIES), wait=wait_exponential_jitter(0.2, 5), reraise=True
        ):
            with attempt:
                answer = await self._client.request(method, path, json=body, timeout=seconds)
        answer.raise_for_status()
        return answer


Entry = tuple[int, bytes]
"""Mode and content of a file."""


def _packed(before: Mapping[str, Entry], files: Mapping[str, str]) -> str:
    """The files as a packed archive in base64; a script (`#!`) can be executed."""
    entries = dict(before)
    for path, text in files.items():
        entries[_clean(path)] = (0o755 if text.startswith("#!") else 0o644, text.encode("utf-8", errors="replace"))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, (mode, content) in entries.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return base64.b64encode(packed.getvalue()).decode()


def _unpacked(archive: str) -> dict[str, Entry]:
    """Regular files by their paths; links, which could lead elsewhere, are left out."""
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive)), mode="r:gz") as packed:
        return {
            _clean(member.name): (member.mode & 0o777, content.read())
            for member in packed
            if member.isfile() and (content := packed.extractfile(member)) is not None
        }


def _is_archive(archive: str) -> bool:
    try:
        _unpacked(archive)
    except (ValueError, OSError, EOFError, tarfile.TarError):
        return False
    return True


def _clean(path: str) -> str:
    """A path within the folder. Raises ValueError for one that leads out of it."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise ValueError(f"{path!r} is no file of the working folder")
    return "/".join(parts)
