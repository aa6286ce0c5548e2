"""These tests need CuPy, though most of them no GPU: without it they are not collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("cupy") else ["test_*.py"]
