"""The table of exit codes: every error has a row, and the docs have the same rows."""

from __future__ import annotations

import inspect
import re
import signal

import pytest

from mesh_tensorflow import errors, exit_codes, workers


def test_the_codes_are_fixed():
  assert [row.code for row in exit_codes.TABLE] == [0, 1, 2, 3, 4, 5, 6, 74, 75]
  assert workers.EXIT_WORKER_LOST == exit_codes.WORKER_LOST
  assert exit_codes.INTERRUPTED == exit_codes.of_signal(signal.SIGINT)


@pytest.mark.parametrize(
  ("error", "code"),
  [
    (errors.ConfigError, 2),
    (errors.DataError, 2),
    (errors.LayoutError, 2),
    (errors.CheckpointError, 2),
    (errors.OutOfMemoryError, 2),
    (errors.NonFiniteError, 3),
    (errors.StorageError, 4),
    (errors.DamagedCheckpointError, 5),
    (errors.NewerFormatError, 2),
    (errors.LockedError, 6),
    (errors.StoppedError, 74),
    (errors.WorkerLostError, 75),
    (errors.CollectiveError, 1),
    (ValueError, 1),
    (KeyboardInterrupt, 130),
  ],
)
def test_error(error, code):
  assert exit_codes.of_error(error("x")) == code


def test_every_error_of_the_package_has_a_row():
  rows = {row.code for row in exit_codes.TABLE}
  for _, kind in inspect.getmembers(errors, inspect.isclass):
    assert exit_codes.of_error(kind("x")) in rows


def test_only_lost_workers_and_crashes_are_started_again():
  assert [row.code for row in exit_codes.TABLE if row.restart_cures] == [75]
  assert exit_codes.why_not_again(128 + signal.SIGKILL) is None
  assert exit_codes.why_not_again(128 + signal.SIGSEGV) is None
  assert exit_codes.why_not_again(128 + signal.SIGTERM)
  assert exit_codes.why_not_again(17) == exit_codes.why_not_again(1)


def test_the_docs_have_the_same_table(repository):
  text = (repository / "docs" / "operating.md").read_text()
  rows = re.findall(r"^\| (\d+) \| (.*?) \| (yes|no): (.*?) \|$", text, re.MULTILINE)
  assert [(int(code), meaning, again == "yes", why) for code, meaning, again, why in rows] == [
    (row.code, row.meaning, row.restart_cures, row.why) for row in exit_codes.TABLE
  ]
