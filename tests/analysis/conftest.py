"""No test of this folder needs a GPU, and a run of those that do needs none of its packages."""

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave the folder out where GPU tests alone were asked for."""
    return True if config.option.markexpr == "gpu" else None
