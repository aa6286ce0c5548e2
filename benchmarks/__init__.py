"""Benchmarks: ``python -m benchmarks.<subject>`` measures, prints a table and writes CSV."""
