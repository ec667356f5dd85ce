"""`python -m decode_service`: the decode service as a process."""

import sys
from functools import partial

from decode_service.app import build
from serving_core.config import load_decode_config
from serving_core.service_process import run_service


def main(argv: list[str]) -> int:
    """Run the service with the given flags; returns the exit code."""
    return run_service("decode", load=partial(load_decode_config, argv), build=build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
