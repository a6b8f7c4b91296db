"""Pauses of the garbage collector: nested, in threads, and where it was off before."""

from __future__ import annotations

import gc
import threading

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.environment import collector


def test_the_last_to_leave_switches_it_on():
  inside, leave = threading.Event(), threading.Event()

  def work():
    with collector.paused():
      inside.set()
      leave.wait(60)

  thread = threading.Thread(target=work)
  with collector.paused():
    with collector.paused():
      assert not gc.isenabled()
    assert not gc.isenabled()
    thread.start()
    assert inside.wait(60)
  assert not gc.isenabled()
  leave.set()
  thread.join()
  assert gc.isenabled()


def test_it_is_left_as_it_was():
  with pytest.raises(KeyError), collector.paused():
    raise KeyError
  assert gc.isenabled()
  gc.disable()
  try:
    with collector.paused():
      pass
    assert not gc.isenabled()
  finally:
    gc.enable()


def test_it_rests_while_a_function_is_traced_and_works_while_it_runs():
  seen = []
  a = mtf.Dimension("a", 2)

  @mtf.function(mtf.PlacementMeshImpl("", "", [""]), [mtf.TensorSpec([a])])
  def double(x):
    seen.append(gc.isenabled())
    return x * 2.0

  for _ in range(2):
    assert double(tf.ones([2])).numpy().tolist() == [2.0, 2.0]
    assert gc.isenabled()
  assert seen == [False]
