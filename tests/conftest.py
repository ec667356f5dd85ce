"""Settings and fixtures that every test shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

# transformers takes seconds to import, so only the tests that use it pay for it.
if TYPE_CHECKING:
    from tests.support.oracle import Oracle

# The suite shares two cores with the service processes it starts.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Directories of the tiny random checkpoints: ds_plain, ds_yarn, glm_plain, glm_shared."""
    from tests.support.checkpoints import CHECKPOINT_NAMES, write_tiny_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_tiny_checkpoint(name, root / name) for name in CHECKPOINT_NAMES}


@pytest.fixture(scope="session")
def recall_dir() -> Path:
    """The default model that ships with the package."""
    return Path(__file__).parent.parent / "tandem" / "data" / "tiny-recall"


@pytest.fixture(scope="session")
def oracle_of() -> Callable[[Path], Oracle]:
    """Loads a checkpoint into transformers, once a session."""
    from tests.support.oracle import Oracle

    loaded: dict[Path, Oracle] = {}

    def load(model_dir: Path) -> Oracle:
        if model_dir not in loaded:
            loaded[model_dir] = Oracle(model_dir)
        return loaded[model_dir]

    return load


@pytest.fixture(scope="session")
def greedy_oracle(
    oracle_of: Callable[[Path], Oracle],
) -> Callable[[Path, list[int], int], list[int]]:
    """Greedy tokens of transformers: (model_dir, prompt_token_ids, num_new_tokens) -> tokens."""

    def greedy(model_dir: Path, prompt_token_ids: list[int], num_new_tokens: int) -> list[int]:
        return oracle_of(model_dir).greedy(prompt_token_ids, num_new_tokens).token_ids

    return greedy
