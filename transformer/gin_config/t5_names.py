"""Names in T5's gin files that this package lacks: found in seqio, or left out.

`import t5.models.mesh_transformer` stands in many of them. It means the functions of
`mesh_tensorflow.transformer.data.seqio_tasks`, which need seqio alone: T5's own module needs
TensorFlow 1.
"""

from __future__ import annotations

import importlib
import importlib.util

from mesh_tensorflow.transformer.gin_config import names as gin_names

_OURS = "mesh_tensorflow.transformer.data.seqio_tasks"
_MODULE = "t5.models.mesh_transformer"
_HERE = (
  *("mesh_train_dataset_fn", "mesh_eval_dataset_fn", "mesh_inference_dataset_fn"),
  *("get_vocabulary", "tsv_dataset_fn"),
)
# Names that T5 itself does not read any more, and skips.
_DEPRECATED = frozenset(
  "configurable_vocabulary get_default_spm_path get_sentencepiece_model_path maybe_print_dataset "
  "num_parallel_calls SentencePieceVocabulary train_model Vocabulary".split()
)
# Its preprocessors for unsupervised training, which tasks of the package t5 use.
_PREPROCESSORS = frozenset(
  "denoise drop_noise_tokens drop_nonnoise_tokens iid_noise_mask noise_span_to_sentinel "
  "noise_span_to_unique_sentinel noise_token_to_random_token "
  "noise_token_to_random_token_or_sentinel noise_token_to_sentinel "
  "nonnoise_span_to_unique_sentinel permute_noise_tokens random_prefix_noise_mask "
  "random_spans_helper random_spans_noise_mask random_spans_targets_length "
  "random_spans_tokens_length reduce_concat_tokens regular_noise_mask select_random_chunk "
  "split_tokens split_tokens_to_inputs_length split_tokens_to_targets_length unsupervised".split()
)
_MODULES = frozenset(
  "mesh_transformer preprocessors sentencepiece_vocabulary t5 utils vocabularies".split()
)


def is_import_of_t5(module: str) -> bool:
  """True if a module belongs to the package t5."""
  return f"{module}.".startswith("t5.")


def import_t5(module: str) -> str | None:
  """Imports what stands for a module of t5: here, or in the package t5 if that is installed.

  Args:
    module: its name.

  Returns:
    None, or why there is nothing to import.
  """
  if f"{module}.".startswith("t5.models."):
    _load()
    return None
  if importlib.util.find_spec("t5") is None:
    return "the package t5 is not installed"
  try:
    importlib.import_module(module)
  except Exception as e:  # noqa: BLE001 - parts of it need TensorFlow 1.
    return f"{type(e).__name__}: {' '.join(str(e).split())}"
  return None


def register(selector: str) -> None:
  """Lets gin know the functions of `t5.models.mesh_transformer`, if a name is of one of them."""
  module, _, last = selector.rpartition(".")
  if last in _HERE and f".{_MODULE}".endswith(f".{module}" if module else ""):
    _load()


def is_left_out(selector: str) -> bool:
  """True if a name belongs to a part of T5 that this package leaves out."""
  module, _, last = selector.rpartition(".")
  if last not in _DEPRECATED | _PREPROCESSORS or gin_names.whole_selectors(selector):
    return False
  return not module or module.split(".")[0] == "t5" or module.split(".")[-1] in _MODULES


def _load() -> None:
  # T5's own may be there, loaded by somebody else.
  if not gin_names.whole_selectors(f"{_MODULE}.{_HERE[0]}"):
    importlib.import_module(_OURS)
