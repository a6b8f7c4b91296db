"""Vocabularies; `vocabulary`, `subword_vocabulary` and `t2t_vocabulary` have the public names."""
