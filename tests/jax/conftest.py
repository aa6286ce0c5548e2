"""These tests need JAX: without it they are not collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("jax") else ["test_*.py"]
