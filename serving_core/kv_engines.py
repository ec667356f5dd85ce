"""Makes the transfer engine that the configuration names."""

from pathlib import Path

from kv_transfer.engine.base import TransferEngine
from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.engine.mooncake import MooncakeEngine, MooncakeSettings
from kv_transfer.engine.shm import ShmEngine
from kv_transfer.errors import EngineConfigError
from serving_core.config import ServiceConfig
from serving_core.errors import ConfigError


def make_engine(config: ServiceConfig) -> TransferEngine:
    """Return a new engine.

    Raises:
        ConfigError: The name is unknown, or the engine cannot be used here.
    """
    if config.kv_engine == "shm":
        return ShmEngine(Path(config.kv_socket_dir))
    if config.kv_engine == "loopback":
        return LoopbackEngine()
    if config.kv_engine == "mooncake":
        settings = MooncakeSettings(
            host=config.kv_host,
            allow_network=config.insecure_kv_network,
            protocol=config.kv_protocol,
            device=config.kv_device,
        )
        try:
            return MooncakeEngine(settings)
        except EngineConfigError as error:
            raise ConfigError([f"kv-engine = mooncake: {error}"]) from error
    raise ConfigError([f"kv-engine = {config.kv_engine}: must be shm, mooncake or loopback"])
