"""Makes the transfer engine that the configuration names."""

from pathlib import Path

from kv_transfer.engine.base import TransferEngine
from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.engine.shm import ShmEngine
from serving_core.config import ServiceConfig
from serving_core.errors import ConfigError


def make_engine(config: ServiceConfig) -> TransferEngine:
    """Return a new engine.

    Raises:
        ConfigError: The name is unknown.
    """
    if config.kv_engine == "shm":
        return ShmEngine(Path(config.kv_socket_dir))
    if config.kv_engine == "loopback":
        return LoopbackEngine()
    raise ConfigError([f"kv-engine = {config.kv_engine}: must be shm or loopback"])
