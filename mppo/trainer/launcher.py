"""What a worker has to do with the process that launched it."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def end_with_launcher() -> None:
    """From now on the kernel kills this process when the one that launched it dies, however that ends.

    torchrun ends its workers when it is asked to end, but killed outright it would leave them writing into the run's
    folder. On Linux; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
