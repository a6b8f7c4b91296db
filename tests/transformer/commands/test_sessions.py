"""Sessions of the real program, as they ended when they were written down: see sessions/*.txt.

Exit codes, lines, and names of files are compared; numbers with a point are masked, as they are not
the same on all processors. With MTF_WRITE_SESSIONS=1 they are written anew.
"""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from tests import as_before, fork_server
from tests.as_before_cases import params, small
from tests.conftest import ROOT

WRITTEN = pathlib.Path(__file__).parent / "sessions"
TRAINED = ["--steps=6", "--report_every=2", "--save_every=3", "--eval_every=3"]
NAN = ["--set", "schedule=constant", "--learning_rate=1e30", "--optimizer=Sgd"]


def trains(run):
  words = small(run)
  run.cli("train", "train", "--model_dir=m", *words, *TRAINED)
  run.cli("nothing is left", "train", "--model_dir=m", *words, *TRAINED)
  run.cli("on", "train", "--model_dir=m", *words, *TRAINED, "--steps=8")
  run.cli("another model", "train", "--model_dir=m", *words, "--steps=9", "--set", "d_ff=64")
  run.cli("another vocabulary", "train", "--model_dir=m", *words, "--steps=9",
          "--vocabulary=bytes")  # fmt: skip
  run.cli("other dropout", "train", "--model_dir=m", *words, "--steps=9", "--set", "dropout=0.3",
          "--allow_config_change", "--seed=4")  # fmt: skip


def ends_early(run):
  words = [*small(run), "--report_every=2"]
  run.cli("nan", "train", "--model_dir=n", *words, *NAN, "--steps=5")
  skip = params("run.nonfinite = 'skip'")
  run.cli("nan, skipped", "train", "--model_dir=s", *words, *NAN, *skip, "--steps=5")
  run.cli("no better", "train", "--model_dir=e", *words, "--steps=40", "--eval_every=2",
          "--learning_rate=0", *params("run.early_stopping_patience = 2"))  # fmt: skip
  run.cli("no better, again", "train", "--model_dir=e", *words, "--steps=40", "--eval_every=2",
          "--learning_rate=0", *params("run.early_stopping_patience = 2"))  # fmt: skip
  run.cli("no evaluations", "train", "--model_dir=x", *words, "--steps=4",
          *params("run.early_stopping_patience = 2"))  # fmt: skip


def keeps(run):
  words = [*small(run), "--steps=5"]
  run.cli("two", "train", "--model_dir=a", *words, "--save_every=1",
          *params("run.keep_checkpoint_max = 2"))  # fmt: skip
  run.cli("of the average", "train", "--model_dir=c", *words, "--eval_every=3",
          *params("run.ema_decay = 0.5", "run.use_ema = True"))  # fmt: skip
  run.cli("no average", "train", "--model_dir=d", *words, *params("run.use_ema = True"))
  run.cli("start", "train", "--model_dir=f", *words, "--init_checkpoint=a/model.ckpt-4")
  run.cli(
    "start from no step", "train", "--model_dir=g", *words, "--init_checkpoint=a/model.ckpt-1"
  )
  run.cli("start from another", "train", "--model_dir=h", *words, "--init_checkpoint=a", "--set",
          "d_ff=64")  # fmt: skip


def uses(run):
  run.write("lines.txt", "To be\nROMEO: To\nWhether 'tis\n")
  run.cli("train", "train", "--model_dir=m", *small(run), *TRAINED)
  for name, *words in (
    ("eval", "eval"), ("eval of all", "eval", "--checkpoint=all", "--batch_size=4"),
    ("eval of some", "eval", "--checkpoint=3,6", "--by=loss", "--batches=1"),
    ("eval of no step", "eval", "--checkpoint=5"), ("eval of texts", "eval", "--by=texts"),
    ("eval of train", "eval", "--split=train", "--batches=2"),
    ("eval of no split", "eval", "--split=nothing"),
    ("score", "score", "--targets=lines.txt", "--output=s"),
    ("score pairs", "score", "--targets=lines.txt", "--inputs=lines.txt", "--checkpoint=3"),
    ("score uneven", "score", "--targets=lines.txt", "--inputs=text.txt"),
    ("export", "export", "--output=e", "--checkpoint=3"),
    ("export scores", "export", "--output=f", "--scores", "--batch_size=2"),
    ("export of no step", "export", "--output=g", "--checkpoint=4"), ("export nowhere", "export"),
    ("infer of no step", "infer", "--prompt=To", "--checkpoint=77"),
    ("long prompt", "infer", f"--prompt={'To be ' * 20}", "--max_tokens=3"),
    ("other characters", "infer", "--prompt=\u4e00", "--max_tokens=3", "--output=o"),
  ):  # fmt: skip
    run.cli(name, words[0], "--model_dir=m", *words[1:])


SESSIONS = [trains, ends_early, keeps, uses]


# Of processors, of packages that are installed, of places in gin files.
MASKS = (
  (r"-?\d+\.\d+(e[-+]?\d+)?", "#.#"),
  (r" \(\S+ Shape\[.*?\] was not finite first, in step \d+\)", ""),
  (r"(\.gin):\d+", r"\1:#"),
  (r"pip install tensorboard && ", ""),
  (r"\n  stdout: losses .*|\n  files: writes \S+/(loss.png|fingerprint.pb)", ""),
  (r"[ ]+$", ""),
)


def shown(outcome):
  lines = []
  for name in ("exit code", "stdout", "stderr", "files"):
    lines += [f"  {name}: {line}" for line in outcome.texts[name]]
  text = "\n".join(lines)
  for pattern, mask in MASKS:
    text = re.sub(pattern, mask, text, flags=re.MULTILINE)
  return text


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("session", SESSIONS, ids=lambda s: s.__name__)
def test_session(session, tmp_path):
  side = as_before.Side("this", ROOT, lambda kind: fork_server.of_tests())
  run = as_before.Run(side, side, tmp_path, contents=False)
  session(run)
  found = "".join(f"{name}\n{shown(outcome)}\n" for name, outcome in run.outcomes.items())
  path = WRITTEN / f"{session.__name__}.txt"
  if os.environ.get("MTF_WRITE_SESSIONS") == "1":
    WRITTEN.mkdir(exist_ok=True)
    path.write_text(found)
  assert found == path.read_text()
