"""`python -m prefill_service`: the prefill service as a process."""

import sys

from prefill_service.app import build
from serving_core.config import load_prefill_config
from serving_core.errors import ConfigError
from serving_core.service_process import EXIT_NOT_STARTED, run_service


def main(argv: list[str]) -> int:
    """Run the service with the given flags; returns the exit code."""
    try:
        config = load_prefill_config(argv)
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"prefill: {problem}\n")
        return EXIT_NOT_STARTED
    return run_service("prefill", log_level=config.log_level, build=lambda: build(config))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
