"""Other systems on the same work: what one would pick, or build, in place of Tidegate.

``python -m benchmarks.peers`` installs what is to be had by package. A peer that cannot run is left
out, and the report says why.
"""
