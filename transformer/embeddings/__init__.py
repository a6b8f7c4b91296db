"""Embeddings of tokens other than one table: smaller ones, and richer distributions.

Each class can be bound as `get_vocab_embedding_cls.cls`; with
`Unitransformer.shared_embedding_and_softmax_weights = True` it makes the logits too. `vocab_dim` is
the dimension that the model uses, its size rounded up to a multiple of
`Unitransformer.vocab_divisor`.
"""
