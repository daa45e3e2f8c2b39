"""The command ``tidegate``, also as ``python -m gateway``."""

import sys


def main() -> int:
    """Runs the command line; returns the exit code."""
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
