"""Maps a model file into memory, read-only; every reader starts here."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headway.errors import CheckpointError


class MappedFile:
    """A read-only memory map of a regular file.

    The map stays valid while views of it live. A file that another process truncates while it is mapped kills the
    reader (SIGBUS); replace model files by renaming, never in place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if not stat.S_ISREG(path.stat().st_mode):
                    raise CheckpointError(f"{str(path)!r} is not a regular file")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
        except ValueError as error:
            raise CheckpointError(f"{str(path)!r} is empty; download it again") from error
        self.size = len(self.data)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self.data, np.uint8)

    def view(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes ``start:stop``, which the caller has checked against ``size``."""
        if self._bytes is None:
            raise CheckpointError(f"{str(self.path)!r} is closed")
        assert 0 <= start <= stop <= self.size
        return self._bytes[start:stop]

    def forget(self) -> None:
        """Give back the memory of the pages that were read; the system reads them again when they are wanted again."""
        if self._bytes is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap now, or when the last view goes."""
        if self._bytes is None:
            return
        self._bytes = None
        data = self.data
        del self.data
        try:
            data.close()
        except BufferError:
            return  # a tensor still looks at the map: its last reference unmaps
