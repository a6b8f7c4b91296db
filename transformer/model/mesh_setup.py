"""From mesh shape, layout and devices to a mesh implementation, with early errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import gin
import tensorflow as tf
from absl import flags

import mesh_tensorflow as mtf
from mesh_settings.run import MESH_IMPLEMENTATIONS
from mesh_tensorflow import workers
from mesh_tensorflow.environment import quiet
from mesh_tensorflow.errors import ConfigError, LayoutError, MeshShapeError
from mesh_tensorflow.meshes import layout_names
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.meshes.shares import SharesLike, device_grid
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.workers import agreement

# In place of a mesh shape or layout rules: they are to be found.
AUTO = "auto"

# Names that the shipped layouts use for parts which a model or mesh may not have.
STANDARD_TENSOR_NAMES = frozenset(
  "batch outer_batch ensemble length memory_length d_model d_ff d_kv heads query_heads vocab "
  "experts expert_x expert_y expert_hidden max_length microbatch beam buckets".split()
)
STANDARD_MESH_NAMES = frozenset("ensemble batch model all outer inner".split())


def is_auto(value: object) -> bool:
  """True if a mesh shape or layout rules are "auto"."""
  return isinstance(value, str) and value.strip() == AUTO


def make_mesh_impl(
  mesh_shape: ShapeLike,
  layout_rules: LayoutLike,
  devices: list[str] | None = None,
  implementation: str = "auto",
  seed: int = 0,
  shard_state: str | Sequence[str] = "",
  reshard_after_forward: bool = True,
  pipeline_stages: int = 1,
  pipeline_schedule: str = "1f1b",
  device_shares: SharesLike | None = None,
) -> mtf.MeshImpl:
  """Builds the mesh that a model runs on.

  Args:
    mesh_shape: mesh shape ("batch:2,model:2"); "" is one device.
    layout_rules: layout rules.
    devices: device names, one per processor (with `device_shares` each device once); by default
      GPUs if there are enough, else virtual CPU devices, made as needed.
    implementation: "placement" (one program for all devices), "simd" (one program per device),
      or "auto": of what runs in one process on CPU devices simd for 2 to 4 of them (it is ready for
      its first step in half the time of placement, and steps take the same), placement for one, for
      5 to 8 (whose steps take less), for up to 8 of pipeline stages, and with `device_shares`; simd
      for all else.
    seed: initial weights are a function of it.
    shard_state: mesh dimensions over which variables are stored in shards; see
      `MeshImpl.with_sharded_state`.
    reshard_after_forward: likewise.
    pipeline_stages: number of such meshes, each for some of the layers; the devices are those of
      all, stage after stage. See `MeshImpl.with_stages`.
    pipeline_schedule: likewise.
    device_shares: for devices of unequal speed, how many processors each one gets, in each stage;
      see `PlacementMeshImpl`.

  If TF_CONFIG names several workers, this one joins them (`workers.join`): TensorFlow must not have
  run anything before. The devices are those of all workers, the same number of each.

  Raises:
    ConfigError: an unknown implementation; or one that cannot run on several workers.
    LayoutError: a layout rule, or `shard_state`, names a mesh dimension that does not exist.
    MeshShapeError: there are too few devices, or `device_shares` do not suit the mesh.
  """
  mesh_shape = mtf.convert_to_shape(mesh_shape)
  layout_rules = mtf.convert_to_layout_rules(layout_rules)
  check_mesh_names(mesh_shape, layout_rules)
  if implementation not in MESH_IMPLEMENTATIONS:
    raise ConfigError(
      f"mesh_implementation {implementation!r} is unknown; use one of "
      f"{', '.join(MESH_IMPLEMENTATIONS)}"
    )
  count = number_of_devices(mesh_shape, pipeline_stages, device_shares)
  cluster = join_workers(mesh_shape, implementation, pipeline_stages)
  if devices:
    devices = list(devices)
    if len(devices) != count:
      of_stages = f", times {pipeline_stages} run.pipeline_stages" if pipeline_stages > 1 else ""
      has = f"{mesh_shape.size} processors{of_stages}"
      if device_shares is not None:
        has += f", for {count} devices with run.device_shares"
      raise MeshShapeError(
        f"run.mesh_devices names {len(devices)} devices, run.mesh_shape "
        f"{mesh_shape.to_string} has {has}"
      )
    if cluster.size > 1 and not all("/job:" in d and "/task:" in d for d in devices):
      raise ConfigError(
        f"run.mesh_devices {devices}: with the {cluster.size} workers of TF_CONFIG each name must "
        f"say whose device it is, such as {cluster.devices(cluster.size)[0]}; or leave it out"
      )
  else:
    devices = find_devices(count)
  on_cpu = all("GPU" not in d for d in devices)
  if implementation == "auto":
    alone = cluster.size == 1 and on_cpu
    has_stages = pipeline_stages > 1 and count <= 8
    one_program = alone and (count == 1 or 4 < count <= 8 or has_stages)
    implementation = "placement" if one_program or device_shares is not None else "simd"
  store = mtf.VariableStore(seed=seed)
  kind = mtf.PlacementMeshImpl if implementation == "placement" else mtf.SimdMeshImpl
  each = count // pipeline_stages
  first, *others = [
    kind(
      mesh_shape, layout_rules, devices[i : i + each], variable_store=store, shares=device_shares
    )
    for i in range(0, count, each)
  ]
  for i, stage in enumerate([first, *others] if others else []):
    holders = [w for w, processors in enumerate(stage.processors_of_workers) if processors]
    if len(holders) > 1:
      raise ConfigError(
        f"stage {i} of run.pipeline_stages ({pipeline_stages}) has devices of "
        f"{cluster.names(holders)}: "
        f"{', '.join(str(stage.processor_device(p)) for p in range(stage.size))}; the mesh of a "
        "stage is of one worker: order run.mesh_devices so, or leave it out"
      )
  with naming_setting("run.shard_state", mesh_shape):
    impl: mtf.MeshImpl = first.with_sharded_state(shard_state, reshard_after_forward)
  if not others:
    return impl
  return impl.with_stages(
    [other.with_sharded_state(shard_state, reshard_after_forward) for other in others],
    pipeline_schedule,
  )


def number_of_devices(
  mesh_shape: mtf.Shape, pipeline_stages: int = 1, device_shares: SharesLike | None = None
) -> int:
  """Number of devices of a mesh and all its stages.

  Args:
    mesh_shape: of a stage.
    pipeline_stages: number of stages.
    device_shares: see `make_mesh_impl`.

  Raises:
    ConfigError: there are shares, and TF_CONFIG names several workers.
    MeshShapeError: the shares do not suit the mesh.
  """
  if device_shares is None:
    return int(mesh_shape.size) * pipeline_stages
  check_one_process(device_shares)
  with naming_setting("run.device_shares", mesh_shape):
    return int(device_grid(mesh_shape, device_shares).size) * pipeline_stages


@contextlib.contextmanager
def naming_setting(name: str, mesh_shape: mtf.Shape) -> Iterator[None]:
  """Context manager: errors of a mesh begin with the setting that they are about.

  Args:
    name: the setting, such as "run.shard_state".
    mesh_shape: the mesh shape, with which they end.
  """
  try:
    yield
  except (LayoutError, MeshShapeError) as e:
    given = ",".join(f"{d.name}:{d.size}" for d in mesh_shape)
    raise type(e)(f"{name}: {e} (run.mesh_shape, --mesh, is {given!r})") from None


def check_one_process(device_shares: SharesLike | None) -> None:
  """Raises `ConfigError` if devices have shares, and TF_CONFIG names several workers."""
  cluster = workers.cluster_from_environment()
  if device_shares is not None and cluster.size > 1:
    raise ConfigError(
      f"run.device_shares is {device_shares}, but TF_CONFIG names {cluster.size} workers: devices "
      "of unequal shares are of one process so far; leave one of them out"
    )


def join_workers(
  mesh_shape: mtf.Shape, implementation: str = "auto", pipeline_stages: int = 1
) -> workers.Cluster:
  """Joins the workers that TF_CONFIG names, if it names several, with devices for a mesh.

  To be called before TensorFlow runs anything; once joined, it only returns the cluster.

  Args:
    mesh_shape: mesh shape.
    implementation: see `make_mesh_impl`.
    pipeline_stages: likewise; each stage is in one worker.

  Returns:
    The cluster.

  Raises:
    ConfigError: TF_CONFIG is malformed, the implementation cannot run on several workers, they
      have different settings or different code, or they cannot have the same number of stages.
    MeshShapeError: the number of workers does not divide that of the processors.
  """
  cluster = workers.cluster_from_environment()
  if cluster.size == 1:
    return cluster
  if implementation == "placement":
    raise ConfigError(
      f"run.mesh_implementation is 'placement', which runs in one process, but TF_CONFIG names "
      f"{cluster.size} workers: use 'simd' (or 'auto'), or unset TF_CONFIG"
    )
  if pipeline_stages > 1 and pipeline_stages % cluster.size:
    raise ConfigError(
      f"run.pipeline_stages is {pipeline_stages}, but TF_CONFIG names {cluster.size} workers, each "
      "of which has the same number of whole stages: bind run.pipeline_stages to a multiple of "
      f"{cluster.size}, or start a number of workers that divides {pipeline_stages}"
    )
  count = mesh_shape.size * pipeline_stages
  cluster.devices(count)  # Checks the number, before anybody waits for anybody.
  if workers.current().size == 1:
    workers.join(cluster, virtual_cpu_devices=count // cluster.size)
    agreement.check_same(_program_lines(mesh_shape))
  return workers.join(cluster)


def _program_lines(mesh_shape: mtf.Shape) -> list[str]:
  """Lines that must be equal in all workers: settings, mesh shape, versions."""
  settings = gin.config_str(max_line_length=10**6).splitlines()
  lines = [line for line in settings if line and not line.startswith("#")]
  lines.append(f"mesh shape {mesh_shape.to_string}")
  if flags.FLAGS.is_parsed() and "model_dir" in flags.FLAGS:
    lines.append(f"--model_dir={flags.FLAGS.model_dir}")
  return lines + agreement.versions(*mtf.__path__, os.path.dirname(os.path.dirname(__file__)))


def find_devices(count: int) -> list[str]:
  """Names of `count` devices: GPUs if there are enough, else virtual CPU devices.

  After `workers.join`, devices of all workers, the same number of each.

  Raises:
    MeshShapeError: TensorFlow has started with fewer CPU devices, so no more can be made.
  """
  cluster = workers.current()
  if cluster.size > 1:
    here = count // cluster.size
    gpus = tf.config.list_physical_devices("GPU")
    lacking = workers.any_worker(len(gpus) < here)
    return cluster.devices(count, "CPU" if lacking else "GPU")
  with quiet.held_back_notices():
    gpus = tf.config.list_physical_devices("GPU")
  if len(gpus) >= count:
    return [d.name for d in tf.config.list_logical_devices("GPU")][:count]
  try:
    return mtf.virtual_cpu_devices(count)
  except MeshShapeError as e:
    raise MeshShapeError(
      f"the mesh needs {count} devices; there are {len(gpus)} GPU(s), and {e}"
    ) from e


def check_mesh_names(mesh_shape: mtf.Shape, layout_rules: mtf.LayoutRules) -> None:
  """Raises `LayoutError` for a rule whose mesh dimension neither exists nor is a usual one."""
  layout_names.check_mesh_names(mesh_shape, layout_rules, STANDARD_MESH_NAMES)


def check_tensor_names(impl: mtf.MeshImpl, graph: mtf.Graph) -> None:
  """Raises `LayoutError` for a rule whose tensor dimension neither occurs nor is a usual one."""
  layout_names.check_tensor_names(impl, graph, STANDARD_TENSOR_NAMES)


def describe_layout(impl: mtf.MeshImpl, graph: mtf.Graph, stages: str = "") -> str:
  """Describes the mesh and the number of variables that each layout rule splits; a few lines.

  Args:
    impl: the mesh.
    graph: of a program on it.
    stages: a sentence about the stages of a pipeline, or "".
  """
  shape = " x ".join(f"{d.name}:{d.size}" for d in impl.shape) or "one device"
  lines = [f"mesh {shape}, {type(impl).__name__}"]
  if stages:
    lines.append(f"  {stages}")
  total = slices = sharded = 0
  split: dict[tuple[str, str], int] = {}
  for v in graph.all_variables:
    total += v.size
    stored = v.stored_impl(impl)
    slices += stored.slice_size(v.shape)
    sharded += stored is not impl
    for d, axis in zip(v.shape, impl.tensor_layout(v.shape)):
      if axis is not None:
        key = (d.name, impl.shape[axis].name)
        split[key] = split.get(key, 0) + 1
  present = layout_names.dimension_names(graph)
  rules = impl.layout_rules
  for (tensor_name, mesh_name), (_, written) in zip(rules.pairs, rules.written):
    if mesh_name in impl.shape.dimension_names and tensor_name in present:
      n = split.get((tensor_name, mesh_name), 0)
      what = f"{n} variables" if n else "activations"
      lines.append(f"  {tensor_name:<12} split over {written:<8} ({what})")
  if impl.state_dims:
    names = ", ".join(impl.state_dims)
    lines.append(
      f"  {sharded} of {len(graph.all_variables)} variables stored in shards over {names}"
    )
  lines.append(
    f"  {sum(v.size for v in graph.trainable_variables):,} parameters; with optimizer state "
    f"{total:,} numbers, {slices:,} on each device"
  )
  return "\n".join(lines)
