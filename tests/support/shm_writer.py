"""A writing process of the shm engine for tests that need one to die.

Run as `python -m tests.support.shm_writer`. Reads one JSON line, connects, prints "connected", and
then waits for the end of its input (mode "idle") or writes over the whole target again and again
(mode "write").
"""

import ctypes
import json
import sys
from pathlib import Path

from kv_transfer.engine.base import CopySpan, TargetDescriptor
from kv_transfer.engine.shm import ShmEngine


def main() -> None:
    """Connect and do what the order says."""
    order = json.loads(sys.stdin.readline())
    descriptor = TargetDescriptor(
        engine=ShmEngine.name,
        address=order["address"],
        access_key=bytes.fromhex(order["access_key"]),
        size_bytes=order["size_bytes"],
    )
    engine = ShmEngine(Path(order["socket_dir"]))
    link = engine.connect(descriptor, order["incarnation"], 5.0)
    print("connected", flush=True)
    if order["mode"] == "idle":
        sys.stdin.read()
        return
    source = ctypes.create_string_buffer(b"\xa5" * descriptor.size_bytes)
    whole = CopySpan(ctypes.addressof(source), 0, descriptor.size_bytes)
    link.write([whole], lambda: False)
    print("wrote", flush=True)
    while True:
        link.write([whole], lambda: False)


if __name__ == "__main__":
    main()
