"""Client protocols: frames in and out, over the one vocabulary of ``gateway.commands``."""
