"""Benchmark drivers: `python -m benchmarks.<subject>`."""

import os

# Threads of one competitor that wait for work by spinning would take a core from the next. These
# are read when OpenMP and OpenBLAS are loaded, hence before the drivers import them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
