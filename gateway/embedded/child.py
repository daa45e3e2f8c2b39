"""The last step before a server's program: bind its life to its parent's, and leave root.

Run as a file of its own, ``python -I -S child.py PARENT_PID SIGNAL IDENTITY PROGRAM ARGUMENT…``, so
that nothing but the standard library is loaded and no thread of the parent is forked along. It
becomes the program, so the process id stays.

IDENTITY is ``same``, ``map=ID`` (user and group ID of a new user namespace, which is the present
user outside of it: files need no new owner) or ``user=UID:GID``.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWUSER = 0x10000000
FAILED_STATUS = 126
"""Exit status when the program could not be started; the reason is on standard error."""


def main(arguments: list[str]) -> None:
    parent_pid, death_signal, identity, *command = arguments
    kind, _, value = identity.partition("=")
    if kind == "map":
        _enter_user_namespace(int(value))
    elif kind == "user":
        uid, gid = value.split(":")
        os.setgroups([])
        os.setresgid(int(gid), int(gid), int(gid))
        os.setresuid(int(uid), int(uid), int(uid))
    die_with_parent(int(parent_pid), int(death_signal))
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


def _enter_user_namespace(inner_id: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{inner_id} {uid} 1")
    _write("/proc/self/gid_map", f"{inner_id} {gid} 1")


def die_with_parent(parent_pid: int, death_signal: int) -> None:
    """Comes last, because the kernel forgets the signal when credentials change (prctl(2))."""
    if sys.platform != "linux":
        return
    _call("prctl", PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    # The parent may have died before the call: then nobody will send the signal.
    if os.getppid() != parent_pid:
        raise OSError(f"parent process {parent_pid} is gone")


def _call(function: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*map(ctypes.c_ulong, arguments)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.stderr.write(f"cannot start {sys.argv[4]}: {error}\n")
        sys.exit(FAILED_STATUS)
