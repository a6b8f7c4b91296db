"""The 34 files of the TF1 library: by name, by path and as copies, in the combinations in use."""

from __future__ import annotations

import pathlib
import shutil

import gin
import pytest

from mesh_tensorflow.transformer import gin_config, moe, utils  # noqa: F401
from tests.transformer.gin_config.test_gin_files import GIN, ORIGINAL_FILES

MODELS = [n for n in ORIGINAL_FILES if n.startswith("models/")]
LAYOUTS = [n for n in ORIGINAL_FILES if n.startswith("layouts/")] + ["8x8_dp_r4"]
PROBLEMS = [n for n in ORIGINAL_FILES if n.startswith("problems/")]
SCHEDULES = [n for n in ORIGINAL_FILES if n.startswith("learning_rate_schedules/")]
LADDER = sorted(
  p.relative_to(GIN).with_suffix("").as_posix() for p in GIN.glob("models/mesh_ladder/*_*m.gin")
)
# What these files leave to their user, and sizes that every mesh of theirs divides.
LEFT = [
  "tpu_estimator_model_fn.outer_batch_size = 4",
  "run.batch_size = 512",
  "num_heads = 128",
  "MoE1D.num_experts = 128",
  "untokenized_tfds_dataset.tfds_data_dir = 'data'",
  "pretokenized_tfds_dataset.tfds_data_dir = 'data'",
  "pretokenized_t2t_dataset.data_dir = 'data'",
  "untokenized_tfds_dataset.pack = True",
]
T2T = "t2t_vocabulary.get_t2t_vocabulary.data_dir = 'data'"
MESH = ["run.mesh_shape = ''", "run.layout_rules = ''"]
_OF_LM = ("problems/lm1b", "problems/lm1b_untok", "problems/t2t_lm1b")


def combinations() -> list[tuple[str, ...]]:
  """Each file alone; models with layouts, problems and schedules in turns, so that each is met."""
  found: list[tuple[str, ...]] = [(n,) for n in (*ORIGINAL_FILES, *LADDER)]
  for i, model in enumerate([*MODELS, *LADDER]):
    is_lm = model.startswith(("models/lm", "models/mesh_ladder/lm"))
    problems = [p for p in PROBLEMS if (p in _OF_LM) == is_lm] or PROBLEMS
    layout, problem = LAYOUTS[i % len(LAYOUTS)], problems[i % len(problems)]
    found.append((model, layout))
    if "mesh_ladder" not in model and model != "models/tiny":
      found.append((model, layout, problem, SCHEDULES[i % 2]))
      found.append((model, "models/tiny", problem, layout))
  found += [("models/lm_base", layout, "problems/lm1b") for layout in LAYOUTS]
  found.append(("models/bi_base", "transparent_attention", "layouts/2x2_dp"))
  return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> pathlib.Path:
  """The files as their users have them: anywhere, and lm1b.gin with the name that it had."""
  folder = tmp_path_factory.mktemp("old") / "gin"
  shutil.copytree(GIN, folder)
  lm1b = folder / "problems" / "lm1b.gin"
  text = lm1b.read_text()
  old = text.replace(
    "vocabulary.get_tfds_vocabulary.dataset", "dataset.get_tfds_vocabulary.dataset"
  )
  assert old != text
  lm1b.write_text(old)
  return folder


@pytest.mark.slow
@pytest.mark.parametrize("where", ["name", "path", "copy"])
@pytest.mark.parametrize("with_defaults", [False, True])
def test_combinations(where, with_defaults, copies, caplog):
  prefix = {"name": "", "path": f"{GIN}/", "copy": f"{copies}/"}[where]
  cases = combinations()
  # The names alone are the cheap majority of what the other ways repeat.
  for names in cases if where == "copy" and with_defaults else cases[:: 2 + with_defaults]:
    given = (["defaults"] if with_defaults else []) + [n for n in names if n != "defaults"]
    has_mesh = any(n in LAYOUTS for n in names)
    bindings = LEFT + ([] if has_mesh else MESH) + ([T2T] if "t2t_" in str(names) else [])
    if "problems/lm1b_untok" in names:
      bindings = [*bindings, T2T]
    gin.clear_config()
    caplog.clear()
    gin_config.parse_gin([f"{prefix}{n}.gin" for n in given], bindings)
    gin_config.check_run()
    told = [r.getMessage() for r in caplog.records if r.name == "mesh_tensorflow"]
    assert all("splits nothing" in t for t in told), (given, told)
    for name, value in (("d_model", 128), ("num_layers", 2)) if "models/tiny" in names else ():
      assert gin.query_parameter(f"{name}/macro.value") == value, given


def test_what_an_old_file_misnames_reaches_the_vocabulary(copies):
  gin_config.parse_gin([str(copies / "problems" / "lm1b.gin")], [])
  bound = gin.query_parameter("vocabulary.get_tfds_vocabulary.dataset_name")
  assert "dataset_name" in repr(bound)


@pytest.mark.parametrize("model", ["models/bi_base.gin", "models/lm_base.gin"])
def test_defaults_may_be_given_by_path(model):
  gin_config.parse_gin([str(GIN / "defaults.gin"), model], MESH)
  gin_config.check_run()
