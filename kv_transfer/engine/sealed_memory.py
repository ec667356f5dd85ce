"""Memory that another process can map, and that keeps its size."""

import fcntl
import os
from pathlib import Path

from kv_transfer.errors import TargetAllocationError

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def check_available(num_bytes: int) -> None:
    """Refuse what the machine does not have: allocating it would call the OOM killer instead.

    Raises:
        TargetAllocationError: As said.
    """
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available_bytes = int(line.split()[1]) << 10
            if num_bytes > available_bytes:
                raise TargetAllocationError(
                    f"{num_bytes} bytes of memory: {available_bytes} bytes are available"
                )


def sealed_memory(num_bytes: int) -> int:
    """Return the descriptor of a memfd that is all there and can neither shrink nor grow.

    Raises:
        OSError: It cannot be had.
        OverflowError: No memory is that large.
    """
    fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
