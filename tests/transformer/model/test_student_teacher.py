"""Distillation: loss, what is trained, checkpoints of the teacher."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.transformer import transformer
from tests.transformer import bi_program as bi
from tests.transformer import lm_program as lm
from tests.transformer import numpy_lm

DECODERS = "\n".join(
  f"""
  {which}/decoder/make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.EncDecAttention,
    @transformer_layers.DenseReluDense]
  """
  for which in ("student", "teacher")
)
SETTINGS = """
StudentTeacher.temperature = 2.5
StudentTeacher.fraction_soft = 0.3
StudentTeacher.distill_start_step = 4
Unitransformer.z_loss = 0.02
num_layers = 1
"""
TEMPERATURE, Z_LOSS = 2.5, 0.02


def make_model(bindings=""):
  return bi.make_model(DECODERS + SETTINGS + bindings, model_type="bi_student_teacher")


def program_of(model, step, **options):
  """From inputs and targets to (loss, logits, gradients by name) of a training step."""

  def program(inputs, targets):
    graph = targets.graph
    graph.global_step = mtf.constant(inputs.mesh, step, dtype=np.int64)
    logits, loss = model.call_simple(inputs, targets, True, **options)
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    return loss, logits, dict(zip([v.full_name for v in variables], grads))

  return program


def run(impl, model, step=5, **options):
  return lm.run(impl, program_of(model, step, **options), bi.INPUTS, bi.TARGETS)


def initialized(bindings=""):
  impl, model = lm.one_device(), make_model(bindings)
  run(impl, model)
  bi.random_weights(impl.variable_store)
  return impl, model


def teachers_logits(impl):
  """Those of the teacher alone, without dropout."""
  alone = lm.one_device()
  model = bi.make_model("num_layers = 1\nUnitransformer.z_loss = 0.02")
  store = bi.initialize(alone, model)
  for name in bi.names(alone):
    store[name].assign(impl.variable_store[f"teacher/{name}"].numpy())
  return lm.run(alone, bi.loss_program(model, "eval"), bi.INPUTS, bi.TARGETS)[1]


@pytest.mark.parametrize("dropout,fraction", [(0.0, 0.3), (0.4, 1.0)])
def test_loss_by_its_formula(dropout, fraction):
  """Dropout is the student's alone: its logits, which are returned, and the teacher's give it."""
  impl, model = initialized(f"dropout_rate = {dropout}\nStudentTeacher.fraction_soft = {fraction}")
  options = dict(num_microbatches=2)
  hard, _, hard_grads = run(impl, model, step=4, **options)
  loss, logits, grads = run(impl, model, step=5, **options)
  probabilities = numpy_lm.softmax(teachers_logits(impl).astype(np.float64) / TEMPERATURE)
  student = logits.astype(np.float64) / TEMPERATURE
  log_z = np.log(np.exp(student).sum(-1))
  soft = -(probabilities * (student - log_z[..., None])).sum(-1) + Z_LOSS * log_z**2
  soft = (soft * (bi.TARGETS > 0)).sum() / (bi.TARGETS.size * 2)
  expected = (1 - fraction) * hard + TEMPERATURE**2 * fraction * soft
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert abs(loss - hard) > 1e-3
  assert all(n.startswith("student/") for n in grads) and set(grads) == set(hard_grads)
  assert max(np.abs(grads[n] - hard_grads[n]).max() for n in grads) > 1e-4


def test_the_gradient_is_that_of_the_loss():
  """Against finite differences, in one direction for all variables."""
  impl, model = initialized()
  _, _, grads = run(impl, model)
  rng = np.random.default_rng(1)
  store = impl.variable_store
  start = {name: store[name].numpy() for name in grads}
  direction = {name: rng.normal(size=v.shape) for name, v in start.items()}
  slope = sum((grads[n] * direction[n]).sum() for n in grads)
  losses = []
  for sign in (1, -1):
    for name, value in start.items():
      store[name].assign((value + sign * 1e-3 * direction[name]).astype(np.float32))
    losses.append(float(run(impl, model)[0]))
  np.testing.assert_allclose((losses[0] - losses[1]) / 2e-3, slope, rtol=2e-2)


def test_without_soft_loss_there_is_no_teacher():
  impl, model = lm.one_device(), make_model("StudentTeacher.fraction_soft = 0.0")
  run(impl, model)
  assert not [n for n in bi.names(impl) if n.startswith("teacher/")]
  model.initialize()


def test_without_loss_there_are_the_logits_alone():
  impl, model = initialized()
  expected = run(impl, model)[1]

  def program(inputs, targets):
    return model.call_simple(inputs, targets, compute_loss=False, mode="eval")

  np.testing.assert_allclose(lm.run(impl, program, bi.INPUTS, bi.TARGETS), expected, atol=1e-5)


def test_decode_is_the_students():
  impl, model = initialized()
  ids = lm.run(impl, lambda x: model.decode(x, max_decode_length=4), bi.INPUTS)
  alone = lm.one_device()
  student = bi.make_model("num_layers = 1\nUnitransformer.z_loss = 0.02")
  store = bi.initialize(alone, student)
  for name in bi.names(alone):
    store[name].assign(impl.variable_store[f"student/{name}"].numpy())
  expected = lm.run(alone, lambda x: student.decode(x, max_decode_length=4), bi.INPUTS)
  np.testing.assert_array_equal(ids, expected)


def test_language_models():
  impl = lm.one_device()
  model = transformer.StudentTeacher(
    lm.make_model(), lm.make_model(num_layers=1), temperature=1.0, fraction_soft=1.0
  )

  def program(targets):
    inputs = transformer.autoregressive_inputs(targets)
    targets.graph.global_step = mtf.constant(targets.mesh, 1, dtype=np.int64)
    return model.call_simple(inputs, targets, True)

  logits, loss = lm.run(impl, program, lm.TARGETS)
  assert logits.shape == (2, 6, 11) and np.isfinite(loss)
  partial = np.array([[5, 6, 0, 0]], np.int32)
  assert lm.run(impl, model.decode, partial).shape == (1, 4)
  with pytest.raises(errors.ConfigError, match="Unitransformer or Bitransformer"):
    transformer.StudentTeacher(None, None).decode()


@pytest.mark.parametrize("student_too", [False, True])
def test_checkpoint_of_the_teacher(tmp_path, student_too):
  source = lm.one_device()
  teacher = bi.make_model("num_layers = 1\nUnitransformer.z_loss = 0.02")
  bi.random_weights(bi.initialize(source, teacher), seed=9)
  path = checkpoint.Checkpointer(str(tmp_path), source.variable_store).save(3, asynchronous=False)
  impl, model = initialized(f"""
    StudentTeacher.teacher_checkpoint = "{path}"
    StudentTeacher.initialize_student_weights = {student_too}
  """)  # fmt: skip
  before = {n: impl.variable_store[n].numpy() for n in bi.names(impl)}
  run(impl, model)
  model.initialize()
  for name in bi.names(source):
    expected = source.variable_store[name].numpy()
    np.testing.assert_array_equal(impl.variable_store[f"teacher/{name}"].numpy(), expected)
    expected = expected if student_too else before[f"student/{name}"]
    np.testing.assert_array_equal(impl.variable_store[f"student/{name}"].numpy(), expected)


def test_errors(tmp_path):
  impl = lm.one_device()
  with pytest.raises(errors.ConfigError, match="temperature"):
    run(impl, make_model("StudentTeacher.temperature = None"))
  with pytest.raises(errors.ConfigError, match="z_loss of student"):
    model = make_model()
    model.teacher.decoder.z_loss = 0.5
    run(impl, model)
  with pytest.raises(errors.ConfigError, match="teacher_checkpoint"):
    make_model().initialize()
  with pytest.raises(errors.GraphError, match="no teacher yet"):
    make_model(f'StudentTeacher.teacher_checkpoint = "{tmp_path}"').initialize()
