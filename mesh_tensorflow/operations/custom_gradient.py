"""Functions with a gradient of their own, and recomputation in the backward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import GradientError, GraphError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.program.graph import Operation, Tensor, is_differentiable, on_stage, usable

__all__ = ["CustomGradientOperation", "custom_gradient", "recompute_grad"]

_LOG = logging.getLogger("mesh_tensorflow")


class CustomGradientOperation(Operation):
  """The outputs of a function, with a gradient of their own; see `custom_gradient`.

  Args:
    explicit_inputs: the arguments of the function.
    all_inputs: these, and the other tensors that the function uses.
    fn_outputs: its results.
    grad_fn: function that returns the gradients; for its arguments see `custom_gradient`.
    forward_operations: the operations that the function made.
    name: of the operation.
  """

  lowers_uneven_slices = True
  may_mix_meshes = True

  def __init__(
    self,
    explicit_inputs: Sequence[Tensor],
    all_inputs: Sequence[Tensor],
    fn_outputs: Sequence[Tensor],
    grad_fn: Callable[..., Sequence[Tensor | None]],
    forward_operations: Sequence[Operation],
    name: str | None = None,
  ):
    super().__init__(list(all_inputs) + list(fn_outputs), name=name or "custom_gradient")
    self._num_explicit = len(explicit_inputs)
    self._num_inputs = len(all_inputs)
    self._grad_fn = grad_fn
    self._forward_operations = list(forward_operations)
    self._made_of = list(fn_outputs)
    self._outputs = [Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(fn_outputs)]
    for x, out in zip(fn_outputs, self._outputs):
      out.set_mesh(x.mesh)

  @property
  def lowered_from(self) -> list[Tensor]:
    """The inputs that the lowering needs: the function's results."""
    return self._inputs[self._num_inputs :]

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    # From self._inputs, which a clone has in a version of its own.
    all_inputs = self._inputs[: self._num_inputs]
    forward, outputs = self._forward()
    num_variables = len(self.graph.all_variables)
    with usable([x for op in forward for x in op.outputs]):
      grads = self._grad_fn(
        explicit_inputs=all_inputs[: self._num_explicit],
        all_inputs=all_inputs,
        forward_operations=forward,
        outputs=outputs,
        output_grads=grad_ys,
      )
    new = self.graph.all_variables[num_variables:]
    if new:
      raise GraphError(
        f"{self.name}: grad_fn must not create variables, but made "
        + ", ".join(v.full_name for v in new)
      )
    grads = list(grads)
    for x, g in zip(all_inputs, grads):
      if g is None and is_differentiable(x.dtype):
        _LOG.warning("%s: grad_fn gave no gradient for %s", self.name, x)
    # None also for the function's results, which are inputs too: so no gradient goes through the
    # function itself.
    return grads + [None] * (len(self._inputs) - len(grads))

  def _forward(self) -> tuple[list[Operation], list[Tensor]]:
    """Operations of the function, and its results; of a clone those of the clone."""
    outputs = self._inputs[self._num_inputs :]
    if outputs == self._made_of:
      return list(self._forward_operations), outputs
    names = {op.name for op in self._forward_operations}
    found: set[Operation] = set()
    waiting = list(outputs)
    while waiting:
      x = waiting.pop()
      if x in self._inputs[: self._num_inputs] or x.operation in found:
        continue
      if x.operation.name in names:  # A clone has the name of the original.
        found.add(x.operation)
        waiting += x.operation.inputs
    return [op for op in self.graph.operations if op in found], outputs

  def lower(self, lowering: LoweringInProgress) -> None:
    # The slices of the function's results, as they are: pending sums stay pending.
    for x, out in zip(self._inputs[self._num_inputs :], self._outputs):
      lowering.set_tensor_lowering(out, lowering.tensors[x])


def _external_inputs(
  operations: Sequence[Operation], explicit_inputs: Sequence[Tensor]
) -> list[Tensor]:
  """Floating tensors that operations use and do not make, in the order of their first use.

  Variables, and what else is external, count as used, not made.
  """
  own = [op for op in operations if not op.is_external]
  made = {x for op in own for x in op.outputs}
  made.update(explicit_inputs)
  found = {x: None for op in own for x in op.inputs if x not in made}
  return [x for x in found if is_differentiable(x.dtype)]


def custom_gradient(
  fn: Callable[..., Any],
  grad_fn: Callable[..., Sequence[Tensor | None]],
  explicit_inputs: Sequence[Tensor],
) -> Any:
  """Calls `fn(*explicit_inputs)` and gives its results another gradient.

  Args:
    fn: takes `Tensor`s, returns a `Tensor` or a tuple of them. It may also use other
      tensors and variables (external inputs).
    grad_fn: called with the keywords `explicit_inputs`, `all_inputs` (these, and then the
      floating external inputs in the order of their first use), `forward_operations` (what `fn`
      made), `outputs` (its results, outputs of these operations) and `output_grads`; returns a list
      with a gradient or None for each of `all_inputs`. A shorter list stands for None at the end.
      It must not create variables. The operations may be cloned (`mtf.Graph.clone_operations`), or
      differentiated as they are: `mtf.gradients(outputs, all_inputs, output_grads)`.
    explicit_inputs: a list of `Tensor`s.

  Returns:
    A `Tensor`, or a list of them if `fn` returned a tuple. The other tensors made by
    `fn` cannot be used outside it.

  Raises:
    GraphError: there is no explicit input.
  """
  explicit_inputs = list(explicit_inputs)
  if not explicit_inputs:
    raise GraphError("custom_gradient and recompute_grad need at least one explicit input")
  explicit_inputs = [on_stage(x) for x in explicit_inputs]
  graph = explicit_inputs[0].graph
  result, operations = graph.capture_operations(lambda: fn(*explicit_inputs))
  several = isinstance(result, (tuple, list))
  fn_outputs = list(result) if several else [result]
  external = _external_inputs(operations, explicit_inputs)
  op = CustomGradientOperation(
    explicit_inputs, explicit_inputs + external, fn_outputs, grad_fn, operations
  )
  for inner in operations:
    # What is not cloned (variables, random numbers) is used by the backward pass as it is.
    if inner.is_cloneable:
      for x in inner.outputs:
        if x not in fn_outputs:
          x.usable = False
  return op.outputs if several else op.outputs[0]


class AfterOperation(Operation):
  """Identity of x, with a control dependency on a slice of another tensor."""

  lowers_uneven_slices = True

  def __init__(self, x: Tensor, dependency: Tensor, name: str | None = None):
    super().__init__([x, dependency], name=name or "after")
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return [grad_ys[0], None]

  def lower(self, lowering: LoweringInProgress) -> None:
    x, dependency = [lowering.tensors[t] for t in self._inputs]
    if isinstance(dependency, LazyAllreduceSum):
      # Its sum over the mesh need not be executed for this.
      dependency = dependency.laid_out_input

    def after(t: tf.Tensor, d: tf.Tensor) -> tf.Tensor:
      with tf.control_dependencies([d]):
        return tf.identity(t)

    lowering.set_tensor_lowering(
      self._outputs[0], lowering.mesh_impl(self).slicewise(after, x, dependency)
    )


def recompute_grad(
  fn: Callable[..., object], explicit_inputs: Sequence[Tensor], control_dependencies: bool = True
) -> Any:
  """Calls `fn(*explicit_inputs)`; the backward pass computes it again, to use less memory.

  Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Variables and random
  numbers are not computed again: the recomputation sees the same dropout masks.

  Args:
    fn: takes `Tensor`s, returns a `Tensor` or a tuple of them.
    explicit_inputs: a list of `Tensor`s.
    control_dependencies: whether the recomputation waits for the gradient of the first
      output that has one. Otherwise TensorFlow may merge it with the forward computation.

  Returns:
    A `Tensor`, or a list of them if `fn` returned a tuple.

  Raises:
    GradientError: when differentiated, if a floating explicit input has no gradient.
  """

  def grad_fn(
    explicit_inputs: Sequence[Tensor],
    all_inputs: Sequence[Tensor],
    forward_operations: Sequence[Operation],
    outputs: Sequence[Tensor],
    output_grads: Sequence[Tensor | None],
  ) -> list[Tensor | None]:
    graph = all_inputs[0].graph
    mapping = {x: x for x in all_inputs}
    dependency = next((g for g in output_grads if g is not None), None)
    if control_dependencies and dependency is not None:
      for x in explicit_inputs:
        if is_differentiable(x.dtype):
          mapping[x] = AfterOperation(x, dependency).outputs[0]
    xs = [x for x in mapping if is_differentiable(x.dtype)]
    new_inputs = [mapping[x] for x in xs]
    clones, mapping = graph.clone_operations(forward_operations, mapping)
    pairs = [(mapping.get(y, y), g) for y, g in zip(outputs, output_grads) if g is not None]
    grads = dict(
      zip(
        xs,
        gradients(
          ys=[y for y, _ in pairs],
          xs=new_inputs,
          grad_ys=[g for _, g in pairs],
          operations=clones,
        ),
      )
    )
    for x in explicit_inputs:
      if is_differentiable(x.dtype) and grads[x] is None:
        raise GradientError(
          f"recompute_grad: no output of the function depends on its argument {x}; give it "
          "only the arguments that it uses"
        )
    # A tensor that is an argument twice gets its gradient once.
    return [grads.pop(x, None) for x in all_inputs]

  return custom_gradient(fn, grad_fn, list(explicit_inputs))
