"""What rooms and their past cannot be had for a while."""


class Unavailable(Exception):
    """The answer cannot be had now; the message says why. Trying again is right."""
