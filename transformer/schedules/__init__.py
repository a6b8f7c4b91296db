"""Learning-rate schedules: functions `f(step, total_train_steps, ...)` of the training step.

`step` is a number or a scalar tf.Tensor; the result is a scalar float32 tf.Tensor unless said
otherwise. Nothing is cut off at 0, but in `warmup.py`: a schedule with decay is negative after
`total_train_steps`.

A file has one schedule, or a few of one shape. To add one, copy `rsqrt.py` and name the file here:
gin knows a schedule when its file is imported.
"""

from mesh_tensorflow.transformer.schedules import (
  constant,
  linear,
  noam,
  product,
  rsqrt,
  slanted_triangular,
  warmup,
)
