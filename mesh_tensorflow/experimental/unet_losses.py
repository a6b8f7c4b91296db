"""Losses, metrics and predictions of `unet`, of logits and one-hot labels."""

from __future__ import annotations

from typing import Any

from mesh_tensorflow import layers, ops
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor

# Indices of classes; 0 is what is neither.
LIVER, LESION = 1, 2


def loss_and_metrics(
  y: Tensor, t: Tensor, flags: Any
) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
  """Computes predictions, loss and metrics of a batch from its logits.

  The loss is d * dice + (1 - d) * cross-entropy, with d the flag --dice_loss_weight. Of the
  lesions, with I the sum of probability times truth and A that of probability plus truth, the Dice
  loss is -2 I / (A + epsilon) (Milletari et al., 2016, arXiv:1606.04797): the mean of that of each
  example and that of all together.

  Args:
    y: logits [batch, blocks..., positions..., classes].
    t: one-hot labels of the same shape.
    flags: has the hyperparameters as attributes: those of `unet`.

  Returns:
    (predictions, loss, metrics by name); see `unet.unet_with_spatial_partition`.
  """
  # In float32: sums over millions of positions.
  y, t = ops.to_float(y), ops.to_float(t)
  classes, batch = y.shape.dims[-1], Shape([y.shape.dims[0]])
  probabilities = ops.softmax(y, classes)
  truth, guess = ops.argmax(t, classes), ops.argmax(y, classes)
  liver, lesion = (ops.to_float(ops.equal(truth, c)) for c in (LIVER, LESION))
  guessed = ops.to_float(ops.equal(guess, LESION))

  weight = (
    liver * (flags.xen_liver_weight - 1.0)
    + lesion * (flags.xen_lesion_weight - flags.xen_liver_weight)
    + 1.0
  )
  xen = layers.softmax_cross_entropy_with_logits(y, t, classes)
  loss_xen = ops.reduce_mean(xen * weight)

  p_lesion = ops.gather(probabilities, LESION, classes)
  soft = _overlap(p_lesion, lesion, batch)
  per_case, all_cases = _dice(*soft, flags.dice_epsilon)
  loss_dice = (per_case + all_cases) * -0.5
  loss = loss_dice * flags.dice_loss_weight + loss_xen * (1.0 - flags.dice_loss_weight)

  hard = _overlap(guessed, lesion, batch)
  dice_per_case, dice_global = _dice(*hard, 1e-6)
  metrics = {
    "lesion_pred_ratio": ops.reduce_mean(guessed),
    "lesion_label_ratio": ops.reduce_mean(lesion),
    "accuracy_of_all_classes": ops.reduce_mean(ops.to_float(ops.equal(truth, guess))),
    "lesion_dice_per_case": dice_per_case,
    "lesion_dice_global": dice_global,
    "loss_xen": loss_xen,
    "loss_dice": loss_dice,
    "loss_dice_per_case": per_case * -1.0,
    "loss_dice_global": all_cases * -1.0,
  }
  return [*_predictions(probabilities, t, flags), *hard], loss, metrics


def _overlap(a: Tensor, b: Tensor, batch: Shape) -> tuple[Tensor, Tensor]:
  """Sums of a * b and of a + b, for each example."""
  return ops.reduce_sum(a * b, output_shape=batch), ops.reduce_sum(a + b, output_shape=batch)


def _dice(intersection: Tensor, area: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
  """2 I / (A + epsilon): the mean of the examples', and that of all together."""
  per_case = ops.reduce_mean(intersection * 2.0 / (area + epsilon))
  return per_case, ops.reduce_sum(intersection) * 2.0 / (ops.reduce_sum(area) + epsilon)


def _predictions(probabilities: Tensor, t: Tensor, flags: Any) -> list[Tensor]:
  """Averages over some positions: of liver and lesions, and of the lesions there are."""
  k = flags.pred_downsample
  pool = layers.avg_pool2d if flags.sampled_2d_slices else layers.avg_pool3d
  ksize = (k, k) if flags.sampled_2d_slices else (k, k, k)
  wanted: list[tuple[Tensor, tuple[int, ...]]] = [(probabilities, (LIVER, LESION))]
  if flags.output_ground_truth:
    wanted.append((t, (LESION,)))
  found = []
  for x, indices in wanted:
    x = pool(x, ksize=ksize)
    found += [ops.gather(x, i, x.shape.dims[-1]) for i in indices]
  return found
