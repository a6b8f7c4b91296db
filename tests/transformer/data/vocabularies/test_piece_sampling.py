"""Random cuts into pieces: probabilities, the best cut, all that models hold, two processes."""

from __future__ import annotations

import collections
import functools
import io
import json
import math
import random

import numpy as np
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import subword_vocabulary as sv
from mesh_tensorflow.transformer.data.vocabularies import piece_sampling, subwords

sentencepiece = pytest.importorskip("sentencepiece")

KINDS = ("bpe", "unigram")
# Settings of SentencePiece under which pieces, or what is unknown, are of another form.
FORMS = (
  {},
  {"byte_fallback": True, "vocab_size": 356},
  {
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": ["\n", "<sep>", "<se"],
  },
  {"split_by_whitespace": False, "normalization_rule_name": "nmt_nfkc_cf"},
  {"treat_whitespace_as_suffix": True},
)


def _words() -> tuple[random.Random, list[str]]:
  rng = random.Random(1)
  return rng, ["".join(rng.choices("abcdeé", k=rng.randint(1, 7))) for _ in range(60)]


@functools.cache
def vocabulary(kind: str, form: int = 0, extra_ids: int = 0) -> sv.SentencePieceVocabulary:
  rng, words = _words()
  model = io.BytesIO()
  settings = {"vocab_size": 100, "hard_vocab_limit": False, **FORMS[form]}
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=(" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(300)),
    model_writer=model, model_type=kind, minloglevel=2,
    pad_id=0, eos_id=1, unk_id=2, bos_id=-1, **settings,
  )  # fmt: skip
  return sv.SentencePieceVocabulary(model.getvalue(), extra_ids)


def texts(count: int) -> list[str]:
  """Words, parts of words, what the models do not know, and blanks anywhere."""
  rng, words = _words()
  parts = [*words, *"abcdeé中ßzA\n", " ", " ", " ", "  ", "<sep>", "<se"]
  return ["".join(rng.choices(parts, k=rng.randint(0, 12))) for _ in range(count)]


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_cut_is_sentencepieces(kind, form):
  model = vocabulary(kind, form, extra_ids=3)
  score = sentencepiece.SentencePieceProcessor(model_proto=model.model).get_score
  given = texts(300)
  # Probabilities to a large power leave one cut, or several that are equal.
  found = model.sample(given, 0.0 if kind == "bpe" else 1e6, [1])
  drawn = model.sample(given, 0.3, [1])
  assert drawn != found
  for text, ids, random_ids in zip(given, found, drawn):
    best = model.encode(text)
    if kind == "bpe":
      assert ids == best, text
    else:
      assert len([i for i in ids if i == 2]) == len([i for i in best if i == 2])
      assert sum(map(score, ids)) == pytest.approx(sum(map(score, best)), abs=1e-4), text
    assert model.decode(random_ids) == model.decode(ids) == model.decode(best)


def _cuts(word: str, pieces: dict[str, float]) -> list[list[str]]:
  if not word:
    return [[]]
  return [
    [word[:end], *rest]
    for end in range(1, len(word) + 1)
    if word[:end] in pieces
    for rest in _cuts(word[end:], pieces)
  ]


def _dropout(
  parts: tuple[str, ...], pieces: dict[str, float], dropped: frozenset[tuple[int, int]], rate: float
) -> collections.Counter[tuple[str, ...]]:
  """The probability of each cut by BPE-dropout, by trying both ends of each decision."""
  at = np.cumsum([0, *map(len, parts)]).tolist()
  pairs = [
    (-pieces[a + b], i)
    for i, (a, b) in enumerate(zip(parts, parts[1:]))
    # A pair is known by where it begins, and where its second part does, and ends.
    if a + b in pieces and (at[i], at[i + 1], at[i + 2]) not in dropped
  ]
  if not pairs:
    return collections.Counter({parts: 1.0})
  _, i = min(pairs)
  result: collections.Counter[tuple[str, ...]] = collections.Counter()
  merged = (*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :])
  left_out = dropped | {(at[i], at[i + 1], at[i + 2])}
  for share, following in ((1 - rate, (merged, dropped)), (rate, (parts, left_out))):
    for cut, probability in _dropout(following[0], pieces, following[1], rate).items():
      result[cut] += share * probability
  return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_frequencies_are_the_probabilities(kind, alpha):
  model = vocabulary(kind)
  processor = sentencepiece.SentencePieceProcessor(model_proto=model.model)
  pieces = {processor.id_to_piece(i): processor.get_score(i) for i in range(3, model.vocab_size)}
  draws = 4000
  for number, word in enumerate(sorted(_words()[1], key=len)[-20::5]):
    marked = processor.normalize(word)
    if kind == "bpe":
      probabilities = _dropout(tuple(marked), pieces, frozenset(), alpha)
    else:
      weights = {tuple(c): math.exp(alpha * sum(map(pieces.get, c))) for c in _cuts(marked, pieces)}
      probabilities = {cut: w / sum(weights.values()) for cut, w in weights.items()}
    assert len(probabilities) > 1 or (kind, alpha) == ("bpe", 1.0)
    rows = model.sample([word] * draws, alpha, [number])
    found = collections.Counter(tuple(map(processor.id_to_piece, row)) for row in rows)
    assert set(found) <= set(probabilities)
    for cut, probability in probabilities.items():
      deviation = math.sqrt(draws * probability * (1 - probability))
      assert abs(found[cut] - draws * probability) < 5 * deviation + 3, (word, cut)


def test_an_unknown_character_scores_less_than_the_least_piece():
  """As in SentencePiece: by 10; so it stands where there is no other cut, or now and then."""
  special = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2)]
  sampler = piece_sampling.PieceSampler([*special, ("ab", -1.0, 1), ("a", -2.0, 1)], unigram=True)
  rows = sampler.sample(["ab"] * 4000, 0.1, [0])
  odds = math.exp(0.1 * (-2 - 12 + 1))
  assert rows.count([3]) + rows.count([4, 2]) == 4000
  assert rows.count([4, 2]) / 4000 == pytest.approx(odds / (1 + odds), abs=0.03)
  # Several in a row are one id.
  assert sampler.sample(["xyazx"], 0.1, [0]) == [[2, 4, 2]]


_ELSEWHERE = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("piece_sampling", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for kind in json.load(open(sys.argv[2])):
  sampler = module.PieceSampler(kind["pieces"], kind["unigram"])
  print(json.dumps([sampler.sample(kind["texts"], 0.3, [5, i]) for i in range(2)]))
"""


def test_samples_are_a_function_of_the_arguments(run_subprocess, tmp_path):
  """In this process in any order, and in another one with other hashes."""
  given, expected, asked = texts(50), [], []
  for kind in KINDS:
    # Without what other tests made it keep.
    model = sv.SentencePieceVocabulary(vocabulary(kind, 1).model)
    rows = [model.sample(given, 0.3, [5, i]) for i in (1, 0)][::-1]
    assert rows[0] != rows[1] != model.sample(given, 0.3, [6, 0])
    assert rows[0] == model.sample(given, 0.3, [5, 0])
    expected.append(rows)
    pieces, _ = subwords.read_pieces(model.model)
    normalize = sentencepiece.SentencePieceProcessor(model_proto=model.model).normalize
    normalized = [normalize(text) for text in given]
    asked.append({"pieces": pieces, "unigram": kind == "unigram", "texts": normalized})
  (tmp_path / "asked").write_text(json.dumps(asked))
  done = run_subprocess(
    ["-c", _ELSEWHERE, piece_sampling.__file__, tmp_path / "asked"], env={"PYTHONHASHSEED": "7"}
  )
  assert [json.loads(line) for line in done.stdout.splitlines()] == expected


@pytest.mark.parametrize("kind", ["char", "word"])
def test_models_with_one_cut_are_refused(kind):
  line = "a bad cab"
  model = sv.train_subword_vocabulary([line] * 9, 8 if kind == "char" else 6, model_type=kind)
  with pytest.raises(errors.ConfigError, match="one way only.*'bpe' or 'unigram'"):
    model.sample([line], 0.1, [1])
