"""The CuPy engine: problems become plans, plans become launches of the kernels."""
