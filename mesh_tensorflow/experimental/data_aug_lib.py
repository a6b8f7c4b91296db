"""Augmentation of scans: rank-3 float tensors, with labels 0, 1 (liver) and 2 (lesion).

Plain TensorFlow, for `tf.data`. Random numbers are TensorFlow's (`tf.random.set_seed`).
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError

# Less than this is nothing.
_NONE = 1e-6


def maybe_flip(
  image: tf.Tensor,
  label: tf.Tensor,
  flip_axis: int,
  flip_indicator: float | tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Reverses an axis of both, or not.

  Args:
    image: a scan.
    label: its classes.
    flip_axis: 0, 1 or 2.
    flip_indicator: above 0.5 they are reversed; drawn from 0 to 1 by default.
  """
  if flip_indicator is None:
    flip_indicator = tf.random.uniform([])
  flips = tf.convert_to_tensor(flip_indicator) > 0.5
  return tuple(_where(flips, tf.reverse(t, [flip_axis]), t) for t in (image, label))


def maybe_rot180(
  image: tf.Tensor, label: tf.Tensor, static_axis: int, rot180_k: int | tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
  """Turns both by 180 degrees around an axis, or not.

  Args:
    image: a scan.
    label: its classes.
    static_axis: 0, 1 or 2; the plane of the others is turned.
    rot180_k: quarter turns, 0 or 2; one of them by default.

  Raises:
    ShapeError: there is no such axis.
  """
  if static_axis not in (0, 1, 2):
    raise ShapeError(f"maybe_rot180: static_axis must be 0, 1 or 2, got {static_axis}")
  if rot180_k is None:
    rot180_k = 2 * tf.random.uniform([], 0, 2, tf.int32)
  turns = tf.convert_to_tensor(rot180_k) % 4 > 0
  plane = [axis for axis in range(3) if axis != static_axis]
  return tuple(_where(turns, tf.reverse(t, plane), t) for t in (image, label))


def _where(condition: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
  """One of two tensors of one static shape."""
  return tf.ensure_shape(tf.where(condition, a, b), b.shape)


def _truncated_normal(mean: float | tf.Tensor, stddev: float | tf.Tensor) -> tf.Tensor:
  """A normal number, clipped at two standard deviations."""
  return tf.clip_by_value(
    tf.random.normal([], mean, stddev), mean - 2.0 * stddev, mean + 2.0 * stddev
  )


def intensity_shift(
  image: tf.Tensor,
  label: tf.Tensor,
  per_class_intensity_scale: float,
  per_class_intensity_shift: float,
) -> tf.Tensor:
  """Makes lesions brighter, and the rest darker, by random factors.

  Args:
    image: a scan.
    label: its classes.
    per_class_intensity_scale: standard deviation of the factors; with the next, 0 for no change.
    per_class_intensity_shift: mean of that of lesions; that of the rest has the opposite.
  """
  if per_class_intensity_scale < _NONE and per_class_intensity_shift < _NONE:
    return image
  scale, shift = per_class_intensity_scale, per_class_intensity_shift
  lesion = tf.cast(label > 1.5, image.dtype)
  image += tf.cast(_truncated_normal(shift, scale), image.dtype) * image * lesion
  return image + tf.cast(_truncated_normal(-shift, scale), image.dtype) * image * (1 - lesion)


def image_corruption(
  image: tf.Tensor,
  label: tf.Tensor,
  reso: int,
  image_corrupt_ratio_mean: float,
  image_corrupt_ratio_stddev: float,
) -> tf.Tensor:
  """Sets blobs outside of lesions to zero.

  Args:
    image: a scan.
    label: its classes.
    reso: positions along an axis; blobs have a third of them.
    image_corrupt_ratio_mean: part of the scan that is set to zero; with the next, 0 for no change.
    image_corrupt_ratio_stddev: its standard deviation.
  """
  if image_corrupt_ratio_mean < _NONE and image_corrupt_ratio_stddev < _NONE:
    return image
  mask = _gen_rand_mask(
    1.0 - image_corrupt_ratio_mean, image_corrupt_ratio_stddev, max(reso // 3, 1), image.shape
  )
  kept = tf.logical_or(mask, label > 1.5)
  return tf.where(kept, image, tf.zeros([], image.dtype))


def maybe_add_noise(
  image: tf.Tensor,
  noise_shape: Sequence[int],
  scale0: int,
  scale1: int,
  image_noise_probability: float,
  image_noise_ratio: float,
) -> tf.Tensor:
  """Adds noise of two scales, or not.

  Args:
    image: a scan.
    noise_shape: its shape.
    scale0: positions along an axis for which one number is drawn.
    scale1: the same of the second noise.
    image_noise_probability: to add both.
    image_noise_ratio: largest standard deviation; each noise draws its own.
  """
  if image_noise_probability < _NONE or image_noise_ratio < _NONE:
    return image
  adds = tf.random.uniform([]) < image_noise_probability
  noise = tf.add_n(
    [
      _rand_noise(0.0, tf.random.uniform([], 0.0, image_noise_ratio), scale, noise_shape)
      for scale in (scale0, scale1)
    ]
  )
  return image + tf.cast(tf.where(adds, noise, tf.zeros_like(noise)), image.dtype)


def _rand_noise(
  mean: float | tf.Tensor, dev: float | tf.Tensor, scale: int, shape: Sequence[int]
) -> tf.Tensor:
  """Normal noise of a coarse grid, with linear interpolation in between."""
  sizes = [int(n) for n in shape]
  coarse = [max(n // scale, 1) for n in sizes]
  noise = tf.random.normal(coarse, mean, dev)
  noise = tf.clip_by_value(noise, mean - 2.0 * dev, mean + 2.0 * dev)
  if scale != 1:
    for axis, n in enumerate(sizes):
      noise = _resized(noise, axis, n)
  return noise


def _resized(x: tf.Tensor, axis: int, size: int) -> tf.Tensor:
  """Linear interpolation along an axis; position i lies at i * old / size, as in TensorFlow 1."""
  n = x.shape[axis]
  place = tf.range(size, dtype=tf.float32) * (n / size)
  left = tf.cast(place, tf.int32)
  right = tf.minimum(left + 1, n - 1)
  weight = tf.reshape(place - tf.cast(left, tf.float32), [-1] + [1] * (x.shape.rank - axis - 1))
  return tf.gather(x, left, axis=axis) * (1.0 - weight) + tf.gather(x, right, axis=axis) * weight


def _gen_rand_mask(
  ratio_mean: float,
  ratio_stddev: float,
  scale: int,
  shape: Sequence[int],
  smoothness: int = 0,
) -> tf.Tensor:
  """A mask of blobs that hides all but a random part of the positions.

  Args:
    ratio_mean: the part that is true, on average.
    ratio_stddev: its standard deviation; clipped at two of them, and to 0..1.
    scale: size of the blobs.
    shape: shape of the mask.
    smoothness: side of a cube over which the noise is summed.
  """
  low = max(0.0, ratio_mean - 2.0 * ratio_stddev)
  high = min(1.0, ratio_mean + 2.0 * ratio_stddev)
  ratio = tf.clip_by_value(tf.random.normal([], ratio_mean, ratio_stddev), low, high)
  pattern = _rand_noise(0.0, 1.0, scale, shape)
  if smoothness > 0:
    pattern = _box_sum(pattern, smoothness)
  return _smallest(pattern, ratio)


def _smallest(pattern: tf.Tensor, ratio: tf.Tensor) -> tf.Tensor:
  """Mask of the elements below a percentile (nearest rank; `ratio` is cut to whole percents)."""
  ordered = tf.sort(tf.reshape(pattern, [-1]))
  percent = tf.cast(tf.cast(ratio * 100.0, tf.int32), tf.float32)
  place = tf.cast(tf.round(percent / 100.0 * (ordered.shape[0] - 1)), tf.int32)
  # All, not all but the largest, if all are asked for.
  return tf.logical_or(pattern < ordered[place], percent >= 100.0)


def _box_sum(x: tf.Tensor, side: int) -> tf.Tensor:
  """The sum over a cube of an odd side around each position; zeros lie beyond the ends."""
  side += 1 - side % 2
  x = x[tf.newaxis, ..., tf.newaxis]
  for axis in range(3):
    kernel = tf.ones([side if i == axis else 1 for i in range(3)] + [1, 1], x.dtype)
    x = tf.nn.conv3d(x, kernel, [1] * 5, "SAME")
  return x[0, ..., 0]


def projective_transform(
  image: tf.Tensor,
  label: tf.Tensor,
  reso: int,
  image_translate_ratio: float,
  image_transform_ratio: float,
  sampled_2d_slices: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Moves all planes across an axis by one random projective map; then those across the next.

  Args:
    image: a scan; interpolated linearly.
    label: its classes; each position gets the nearest.
    reso: positions along an axis.
    image_translate_ratio: standard deviation of shifts, in widths; with the next, 0 for no change.
    image_transform_ratio: standard deviation of the other entries of the map.
    sampled_2d_slices: whether only planes across the last axis are moved.
  """
  if image_translate_ratio < _NONE and image_transform_ratio < _NONE:
    return image, label
  for static_axis in [2] if sampled_2d_slices else [0, 1, 2]:
    one, none = (
      [_truncated_normal(mean, image_transform_ratio) for _ in range(n)]
      for mean, n in ((1.0, 2), (0.0, 4))
    )
    shift = [_truncated_normal(0.0, image_translate_ratio * reso) for _ in range(2)]
    entries = [one[0], none[0], shift[0], none[1], one[1], shift[1], none[2], none[3]]
    image = _mapped(image, static_axis, entries, "BILINEAR")
    label = _mapped(label, static_axis, entries, "NEAREST")
  return image, label


def _mapped(
  x: tf.Tensor, static_axis: int, entries: Sequence[tf.Tensor], interpolation: str
) -> tf.Tensor:
  order = [static_axis, *(axis for axis in range(3) if axis != static_axis)]
  planes = tf.transpose(x, order)
  moved = tf.raw_ops.ImageProjectiveTransformV3(
    images=planes[..., tf.newaxis],
    transforms=tf.stack(entries)[tf.newaxis],
    output_shape=planes.shape[1:],
    fill_value=0.0,
    interpolation=interpolation,
    fill_mode="CONSTANT",
  )
  back = [order.index(axis) for axis in range(3)]
  return tf.ensure_shape(tf.transpose(moved[..., 0], back), x.shape)


def maybe_gen_fake_data_based_on_real_data(
  image: tf.Tensor,
  label: tf.Tensor,
  reso: int,
  min_fake_lesion_ratio: float,
  gen_fake_probability: float,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Takes the lesions away and paints others, or not.

  Lesions become as bright as the liver around them, and blobs inside the organ as dark as lesions
  were. Scans whose lesions are not darker than the liver stay as they are.

  Args:
    image: a scan.
    label: its classes.
    reso: positions along an axis; blobs have a thirty-second of them.
    min_fake_lesion_ratio: the smallest part of a scan from which blobs are cut out.
    gen_fake_probability: to do so.
  """
  background = label < 0.5
  lesion = label > 1.5
  liver = tf.logical_not(tf.logical_or(background, lesion))

  def mean(mask: tf.Tensor) -> tf.Tensor:
    number = tf.reduce_sum(tf.cast(mask, image.dtype))
    return tf.math.divide_no_nan(tf.reduce_sum(image * tf.cast(mask, image.dtype)), number)

  both = tf.logical_and(tf.reduce_any(liver), tf.reduce_any(lesion))
  darker = 1.15 * (mean(liver) - mean(lesion))
  darker = tf.where(both, darker, tf.zeros_like(darker))
  ratio = tf.random.normal([], 0.01, 0.01) + tf.random.normal([], 0.0, 0.05)
  ratio = tf.clip_by_value(ratio, min_fake_lesion_ratio, min_fake_lesion_ratio + 0.2)
  side = max(reso // 32, 1)
  blobs = _smallest(_box_sum(_rand_noise(0.0, 1.0, side, image.shape), side), ratio)
  fake = tf.logical_and(blobs, tf.logical_not(background))

  def blurred(mask: tf.Tensor) -> tf.Tensor:
    odd = side + 1 - side % 2
    return _box_sum(tf.cast(mask, image.dtype), side) / float(odd**3)

  painted = image + darker * (blurred(lesion) - blurred(fake))
  classes = tf.where(fake, 2.0, tf.where(background, 0.0, 1.0))
  made = tf.logical_and(darker > 1e-4, tf.random.uniform([]) > 1.0 - gen_fake_probability)
  return _where(made, painted, image), _where(made, tf.cast(classes, label.dtype), label)
