"""The command ``tidegate``, also as ``python -m gateway``."""

import signal
import sys

SERVICES = ("gateway", "relay")


def main() -> int:
    """Runs the command line; returns the exit code."""
    if sys.argv[1:2] and sys.argv[1] in SERVICES:
        # Until it can end in order there is nothing to end. Without a handler the first process of
        # a container would not even notice.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        from gateway.cli import run  # noqa: PLC0415  may be missing what it imports
    except ModuleNotFoundError as error:
        # A bare `pip install tidegate` is for publishing only and brings no typer.
        sys.stderr.write(
            f"tidegate: {error.name} is not installed: pip install 'tidegate[gateway]'\n"
        )
        return 2
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
