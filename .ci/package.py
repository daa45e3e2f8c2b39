"""Checks that a wheel has every file of the packages that git knows (SQL, Lua, pages, markers), and
nothing else."""

import subprocess
import sys
import zipfile

PACKAGES = ("publisher", "outbox", "gateway")


def main(wheel: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], check=True, capture_output=True, text=True
    )
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = set(filter(None, listed.stdout.split("\0"))) - names
    if missing:
        sys.exit(
            f"the wheel lacks {', '.join(sorted(missing))}: see package-data in pyproject.toml"
        )
    foreign = {
        name for name in names if not name.startswith(PACKAGES) and ".dist-info/" not in name
    }
    if foreign:
        sys.exit(f"the wheel has {', '.join(sorted(foreign))}: see packages in pyproject.toml")


if __name__ == "__main__":
    main(sys.argv[1])
