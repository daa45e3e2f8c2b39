"""Benchmarks: what Tidegate costs, beside a floor and a peer, in figures that anyone can reproduce.

``make bench`` or ``python -m benchmarks [NAME …]``; docs/performance.md tells what is measured.
"""
