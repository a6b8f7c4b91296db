"""One seed for all that is random in a run, and others for single purposes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.training import data as training_data
from mesh_tensorflow.training import seeds
from mesh_tensorflow.training.seeds import PURPOSES, Seeds
from tests.transformer import small_lm

BINDINGS = (
  small_lm.WITHOUT_ATTENTION,
  "transformer.sublayer_dropout.dropout_rate = 0.3",
  "run.iterations_per_loop = 2",
  "run.report_every = 1",
)
STEPS = 2


def test_each_purpose_has_the_seed_or_its_own():
  assert Seeds.of_run(7) == Seeds(7, 7, 7, 7)
  assert Seeds.of_run(7, {"data": 3, "sampling": 0}) == Seeds(7, 3, 7, 0)
  with pytest.raises(errors.ConfigError, match="no purpose 'order'; there are 'weights', 'data'"):
    Seeds.of_run(0, {"order": 1})


def test_readers_take_it_if_they_are_given_none():
  assert seeds.chosen(None) == 0
  with seeds.used(5):
    assert (seeds.chosen(None), seeds.chosen(0)) == (5, 0)
  assert seeds.current() == 0


@pytest.fixture
def train(tmp_path, monkeypatch):
  """A function that trains with bindings: initial weights, batches, losses, and last weights."""
  batches = []
  real = training_data.TrainingData.calls

  def calls(*args, **kwargs):
    for call in real(*args, **kwargs):
      batches.append(call[0].numpy())
      yield call

  monkeypatch.setattr(training_data.TrainingData, "calls", calls)
  numbers = iter(range(100))

  def of(*bindings: str):
    folder = tmp_path / str(next(numbers))
    folder.mkdir()
    batches.clear()
    bindings = (*BINDINGS, *bindings)
    small_lm.run(folder, *bindings, "run.learning_rate_schedule = 0.0", text=small_lm.TEXT)
    initial = weights(folder)
    batches.clear()
    (folder / "trained").mkdir()
    losses = small_lm.run(folder / "trained", *bindings, text=small_lm.TEXT)
    return initial, np.concatenate(batches), np.array(losses), weights(folder / "trained")

  return of


def weights(folder) -> dict[str, np.ndarray]:
  reader = tf.train.load_checkpoint(checkpoint.latest_checkpoint(str(folder / "model")))
  names = [n for n in reader.get_variable_to_shape_map() if "adam_" not in n and "/" in n]
  return {n: reader.get_tensor(n) for n in names if not n.startswith("_")}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
  assert a.keys() == b.keys() and a
  return all(np.array_equal(a[n], b[n]) for n in a)


def test_one_seed_is_one_run_and_another_purpose_changes_only_that(train):
  initial, batches, losses, last = train("run.seed = 4")

  dropout = train("run.seed = 4", "run.seeds = {'dropout': 5}")
  assert same(initial, dropout[0]) and np.array_equal(batches, dropout[1])
  assert not np.array_equal(losses, dropout[2]) and not same(last, dropout[3])

  data = train("run.seed = 4", "run.seeds = {'data': 5}")
  assert same(initial, data[0]) and not np.array_equal(batches, data[1])
  # The masks are those of the run: of a step, whatever its data is.
  other = train("run.seed = 9", "run.seeds = {'data': 4, 'weights': 4, 'dropout': 4}")
  assert same(last, other[3]) and np.array_equal(losses, other[2])

  new_weights = train("run.seed = 4", "run.seeds = {'weights': 5}")
  assert not same(initial, new_weights[0]) and np.array_equal(batches, new_weights[1])


def test_seeds_are_checked_before_anything_runs(tmp_path):
  with pytest.raises(errors.ConfigError, match=r"run\.seeds = .*must be a dict from 'weights'"):
    small_lm.run(tmp_path, "run.seeds = {'order': 3}", text=small_lm.TEXT)
  with pytest.raises(errors.ConfigError, match="whole numbers"):
    small_lm.run(tmp_path, "run.seeds = {'data': 0.5}")


def test_purposes_are_those_of_the_class():
  assert tuple(Seeds.__dataclass_fields__) == PURPOSES
