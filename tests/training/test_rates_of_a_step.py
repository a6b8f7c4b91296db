"""From what a trainer tells its rates: the positions of a step."""

from __future__ import annotations

from tests.transformer import training_program as program


def test_positions_of_a_step_are_those_of_the_longest_sequences(cpu_devices):
  trainer = program.make_trainer()
  trainer.steps.sequence_length = {"inputs": program.LENGTH + 3, "targets": program.LENGTH}
  progress, _ = trainer.loop._new_progress(0, 10)
  assert progress.rates.tokens == program.BATCH * (program.LENGTH + 3)
