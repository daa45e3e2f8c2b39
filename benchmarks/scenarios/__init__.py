"""The scenarios, one noun each: ``run(bench)`` gives a ``Result``."""

SCENARIOS = ("fanout",)
