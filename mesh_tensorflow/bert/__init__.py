"""BERT (Devlin et al., 2018, arXiv:1810.04805) on a mesh: the model, its data, and its programs.

    bert                 the model: `BertConfig`, `BertModel`; config and layers beside it
    tokenization         text to WordPieces; `make_vocab` makes a vocabulary from text
    create_pretraining_data   text files to records: masked LM, next sentence
    run_pretraining, run_classifier, run_squad   the programs, each with its flags
    optimization         learning rate, clipping, the choice of variables
    checkpoint_names, convert   weights of Google's and Hugging Face's BERT, both ways
    training, settings, program_flags   what the programs share: the loop, mesh, data; flags

Programs are run as modules: `python -m mesh_tensorflow.bert.run_pretraining --help`. A file is
imported when it is asked for first (`mtf.bert.bert`): programs define flags.
"""

import pkgutil as _pkgutil
import typing as _typing

from mesh_tensorflow import removed_names as _removed_names

_LATE = sorted(module.name for module in _pkgutil.iter_modules(__path__))

if _typing.TYPE_CHECKING:
  from mesh_tensorflow.bert import bert as bert
  from mesh_tensorflow.bert import optimization as optimization
  from mesh_tensorflow.bert import tokenization as tokenization
else:
  __getattr__ = _removed_names.attribute_hook(__name__, late=_LATE)


def __dir__() -> list[str]:
  return sorted({*globals(), *_LATE})
