"""One run at a time in a run's folder."""

import fcntl
import os
import socket
from datetime import datetime
from pathlib import Path

from mppo.errors import ConfigError


class RunLock:
    """Held by the first rank from the start to its end, however it ends: the kernel lets go of it with the process.

    A lock of POSIX, which children do not inherit and network file systems know.
    """

    def __init__(self, out_dir: str | Path):
        """Take it. Raises ConfigError that says who has it."""
        path = Path(out_dir) / "run.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._file.seek(0)
            holder = self._file.read().strip() or "another run"
            self._file.close()
            raise ConfigError(
                f"trainer.out_dir={out_dir} is in use by {holder}; wait for it, end it, or give another trainer.out_dir"
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
        self._file.flush()

    def release(self) -> None:
        """Let the next run in. The file stays: taking it away could take it from under another run."""
        self._file.close()
