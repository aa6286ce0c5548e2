"""What the benchmarks are made of: timing in interleaved rounds, problems, peers, result files.

The drivers in ``benchmarks/`` put these together; each writes ``results/<machine>/<subject>.csv``.
"""
