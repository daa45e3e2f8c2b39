"""Checks that a wheel has every file of the packages that git knows: SQL, Lua, pages, markers."""

import subprocess
import sys
import zipfile

PACKAGES = ("publisher", "outbox", "gateway")


def main(wheel: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], check=True, capture_output=True, text=True
    )
    missing = set(filter(None, listed.stdout.split("\0"))) - set(zipfile.ZipFile(wheel).namelist())
    if missing:
        sys.exit(
            f"the wheel lacks {', '.join(sorted(missing))}: see package-data in pyproject.toml"
        )


if __name__ == "__main__":
    main(sys.argv[1])
