"""A name of the archived package for `mesh_tensorflow.decoding.beam_search`."""

from mesh_tensorflow.decoding.beam_search import (
  EOS_ID,
  INF,
  beam_search,
  compute_topk_scores_and_seq,
  greedy_decode,
)

__all__ = ["EOS_ID", "INF", "beam_search", "compute_topk_scores_and_seq", "greedy_decode"]
