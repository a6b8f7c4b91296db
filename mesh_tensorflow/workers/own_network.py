"""A private network (namespace) for the workers of one machine, unreachable from outside.

TensorFlow's workers listen on all addresses of a machine, whatever address they are called by, and
whoever reaches such a port can run any graph there: read and write files, as the user who started
it. In a network namespace of Linux there are only the loopback interface and those who have joined.

This file is also the program that makes such a namespace, and that joins one before it becomes
another program: it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

# Of Linux: <sched.h>, <linux/sockios.h>, <linux/if.h>.
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1

# Making one takes milliseconds, and a start of Python.
_SECONDS = 30.0


class OwnNetwork:
  """A network namespace that exists as long as this object or a process in it.

  Raises:
    OSError: the system has none, or does not allow them.
  """

  def __init__(self) -> None:
    if not sys.platform.startswith("linux"):
      raise OSError("only Linux has network namespaces")
    # Root keeps its rights, which it would lose over others' files in a namespace of users.
    kinds = ["net"] if os.geteuid() == 0 else ["user", "net"]
    self._files: list[int] = []
    maker = subprocess.Popen(
      [sys.executable, "-I", "-S", __file__, "make", *kinds],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    try:
      assert maker.stdout is not None
      if maker.stdout.readline().strip() == "made":
        # Open files keep it when the process ends.
        self._files = [os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]
      _, told = maker.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
      told = f"nothing came of it in {_SECONDS:g} s"
    finally:
      maker.kill()
      maker.wait()
    if not self._files:
      raise OSError(told.strip().rpartition("\n")[2] or f"exit code {maker.returncode}")

  def __enter__(self) -> OwnNetwork:
    return self

  def __exit__(self, *exc_info: object) -> None:
    for f in self._files:
      os.close(f)

  @property
  def files(self) -> Sequence[int]:
    """The open files that a process needs to join (`pass_fds` of `subprocess.Popen`)."""
    return self._files

  def command(self, command: Sequence[str]) -> list[str]:
    """A command that joins and then becomes the given one, with the same process id."""
    files = ",".join(map(str, self._files))
    return [sys.executable, "-I", "-S", __file__, "join", files, *command]


@contextlib.contextmanager
def own_network() -> Iterator[tuple[OwnNetwork | None, str]]:
  """Context manager: yields an `OwnNetwork` and "", or None and the reason that there is none."""
  try:
    made = OwnNetwork()
  except (OSError, ValueError) as e:
    yield None, str(e)
    return
  with made:
    yield made, ""


def _make(kinds: Sequence[str]) -> None:
  """Creates the namespaces in this process, prints "made", and waits until stdin is closed."""
  users, groups = os.geteuid(), os.getegid()
  _call("unshare", _NEW_NET | (_NEW_USER if "user" in kinds else 0))
  if "user" in kinds:
    # Everybody stays who he is.
    for name, text in (
      ("setgroups", "deny"),
      ("uid_map", f"{users} {users} 1"),
      ("gid_map", f"{groups} {groups} 1"),
    ):
      with open(f"/proc/self/{name}", "w") as f:
        f.write(text)
  _loopback_up()
  print("made", flush=True)
  sys.stdin.read()


def _loopback_up() -> None:
  import fcntl
  import socket
  import struct

  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    request = struct.pack("16sH14x", b"lo", 0)
    (flags,) = struct.unpack_from("16xH", fcntl.ioctl(s, _GET_FLAGS, request))
    fcntl.ioctl(s, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _join(files: Sequence[int], command: Sequence[str]) -> None:
  for f in files:
    _call("setns", f, 0)
    os.close(f)
  # Python ignores it, and what is ignored stays so in the next program.
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  os.execvp(command[0], list(command))


def _call(name: str, *numbers: int) -> None:
  if getattr(ctypes.CDLL(None, use_errno=True), name)(*numbers):
    number = ctypes.get_errno()
    raise OSError(number, f"{os.strerror(number)} ({name})")


if __name__ == "__main__":
  if sys.argv[1] == "make":
    try:
      _make(sys.argv[2:])
    except OSError as e:
      sys.exit(f"{e.strerror or e}")
  else:
    _join([int(f) for f in sys.argv[2].split(",")], sys.argv[3:])
