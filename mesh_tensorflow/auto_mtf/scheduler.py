"""Orders of operations that need little memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from mesh_tensorflow.auto_mtf.graph_interface import GraphInterface
from mesh_tensorflow.errors import UnsupportedError


def minimize_peak_memory(graph: GraphInterface, scheduler_alg: str) -> Iterable[int]:
  """Schedules the operations in an order that their dependencies allow.

  Args:
    graph: a `GraphInterface`.
    scheduler_alg: "NAIVE" (the order of the graph) or "LIST" (greedy: next runs what frees most).

  Returns:
    Numbers of the operations.

  Raises:
    UnsupportedError: it is neither (a NotImplementedError).
  """
  if scheduler_alg == "NAIVE":
    return range(graph.get_num_operations())
  if scheduler_alg == "LIST":
    return _list_schedule(graph)
  raise UnsupportedError(f"scheduler_alg must be 'NAIVE' or 'LIST', got {scheduler_alg!r}")


def _list_schedule(graph: GraphInterface) -> list[int]:
  names = list(graph.get_all_operation_names())
  numbers = {name: i for i, name in enumerate(names)}
  inputs = {name: list(graph.get_operation_input_names(name)) for name in names}
  outputs = {name: list(graph.get_operation_output_names(name)) for name in names}
  size = {x: graph.get_tensor_size(x) for x in graph.get_all_tensor_names()}
  users: dict[str, set[str]] = {x: set() for x in size}
  waits = dict.fromkeys(names, 0)
  for name in names:
    for x in dict.fromkeys(inputs[name]):
      users[x].add(name)
      waits[name] += 1
  # What an operation frees, once it is scheduled None.
  freed: dict[str, int | None] = {}
  for name in names:
    gain = sum(size[x] for x in inputs[name] if len(users[x]) == 1 and not graph.is_tensor_final(x))
    loss = sum(size[x] for x in outputs[name] if users[x] or graph.is_tensor_final(x))
    freed[name] = gain - loss

  heap: list[tuple[int, str]] = []

  def push(name: str) -> None:
    gain = freed[name]
    assert gain is not None
    heapq.heappush(heap, (-gain, name))

  for name in names:
    if not waits[name]:
      push(name)
  schedule: list[int] = []
  while heap:
    gain, name = heapq.heappop(heap)
    if freed[name] is None or -gain != freed[name]:
      continue  # It has got another value since.
    freed[name] = None
    schedule.append(numbers[name])
    for x in outputs[name]:
      for user in users[x]:
        waits[user] -= 1
        if not waits[user]:
          push(user)
    # The TF1 library looked whether the last output is final where it meant the input; layouts
    # that it found depend on that.
    is_final = bool(outputs[name]) and graph.is_tensor_final(outputs[name][-1])
    for x in dict.fromkeys(inputs[name]):
      users[x].discard(name)
      if len(users[x]) == 1 and not is_final:
        (last,) = users[x]
        before = freed[last]
        assert before is not None
        freed[last] = before + size[x]
        if not waits[last]:
          push(last)
  return schedule
