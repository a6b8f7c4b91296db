"""Workers of the launcher reach each other, and nobody reaches them."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import pytest

from mesh_tensorflow.workers import launching, own_network

with own_network.own_network() as (_made, _WHY_NOT):
  pass
allowed = pytest.mark.skipif(bool(_WHY_NOT), reason=f"no network namespaces here: {_WHY_NOT}")
pytestmark = pytest.mark.usefixtures("ctrl_c")

# Worker 0 listens as TensorFlow's workers do, on all addresses; worker 1 asks it.
LISTENING = """
import json, os, pathlib, socket, time
config = json.loads(os.environ["TF_CONFIG"])
index, folder = config["task"]["index"], pathlib.Path({folder!r})
host, _, port = config["cluster"]["worker"][0].partition(":")
if index == 0:
  with socket.create_server(("", int(port))) as server:
    (folder / "port.tmp").write_text(port)
    (folder / "port.tmp").rename(folder / "port")
    connection, _ = server.accept()
    print("worker 1 says", connection.recv(10).decode(), flush=True)
else:
  while not (folder / "tried").exists():
    time.sleep(0.05)
  socket.create_connection((host, int(port))).sendall(b"hello")
"""


def launched(tmp_path: pathlib.Path, reachable: list[bool], **options: bool) -> int:
  """The launcher's exit code; `reachable` gets whether a port can be reached from here."""

  def try_to_reach() -> None:
    deadline = time.monotonic() + 60
    while not (tmp_path / "port").exists() and time.monotonic() < deadline:
      time.sleep(0.05)
    port = int((tmp_path / "port").read_text())
    # To bind it is to find it free, and does not take the connection that worker 1 makes.
    with socket.socket() as s:
      try:
        s.bind(("", port))
        reachable.append(False)
      except OSError:
        reachable.append(True)
    (tmp_path / "tried").write_text("")

  thread = threading.Thread(target=try_to_reach)
  thread.start()
  command = [sys.executable, "-S", "-c", LISTENING.format(folder=str(tmp_path))]
  code = launching.launch(command, 2, **options)
  thread.join()
  return code


@allowed
def test_nobody_reaches_the_ports_of_workers(tmp_path, capfd):
  reachable: list[bool] = []
  assert launched(tmp_path, reachable) == 0
  out, err = capfd.readouterr()
  assert reachable == [False] and "worker 1 says hello" in out
  assert "workers have a network of their own" in err and "--share_network" in err


def test_a_shared_network_is_told(tmp_path, capfd):
  reachable: list[bool] = []
  assert launched(tmp_path, reachable, share_network=True) == 0
  out, err = capfd.readouterr()
  assert reachable == [True] and "worker 1 says hello" in out
  assert "can read and write files as you" in err and "SECURITY.md" in err


def test_a_system_without_them_is_told(monkeypatch, tmp_path, capfd):
  def refused(*_args, **_kwargs):
    raise PermissionError("Operation not permitted (unshare)")

  monkeypatch.setattr(own_network, "OwnNetwork", refused)
  reachable: list[bool] = []
  assert launched(tmp_path, reachable) == 0
  err = capfd.readouterr().err
  assert reachable == [True]
  assert "no network of their own (Operation not permitted (unshare)): whoever reaches" in err


def test_what_is_not_on_this_machine_is_reached(capfd):
  command = [sys.executable, "-S", "-c", "", "--model_dir=gs://bucket/model"]
  assert launching.launch(command, 2) == 0
  assert "since --model_dir=gs://bucket/model is not on this machine" in capfd.readouterr().err


def test_one_worker_listens_on_nothing_and_is_not_talked_about(capfd):
  assert launching.launch([sys.executable, "-S", "-c", ""], 1) == 0
  assert capfd.readouterr().err == ""


@allowed
def test_a_worker_stays_who_it_is(tmp_path):
  program = "import os, signal; print(os.getpid(), os.geteuid(), int(signal.getsignal(15)))"
  with own_network.OwnNetwork() as network:
    command = network.command([sys.executable, "-S", "-c", program])
    process = subprocess.Popen(command, pass_fds=network.files, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
  assert out.split() == [str(process.pid), str(os.geteuid()), "0"] and process.returncode == 0


def test_what_cannot_be_made_says_why(monkeypatch):
  monkeypatch.setattr(sys, "platform", "darwin")
  with own_network.own_network() as (made, why):
    assert made is None and why == "only Linux has network namespaces"
