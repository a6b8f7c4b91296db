"""Text that a trained model writes: prefill, decode, scheduling, sampling, results.

    settings         `sample.*` of gin, and older names for the same
    prefill_decode   the prefill and decode programs of a language model, and its KV cache
    scheduler        continuous batching: requests in slots, sliding windows
    texts            prompts in, texts out: detokenized as they grow, cut at stop strings
    seq2seq          outputs of an encoder-decoder, in batches of similar lengths
    text_metrics     data sets decoded and compared with their targets
    predict          outputs and scores of a batch, as `Trainer.predict` and exports compute them
    saved_model      the same as a SavedModel: strings in, strings or scores out
    files            prompts of files; result files that a run which was interrupted goes on with
    screen           texts on the screen while they are written

How a token is chosen (temperature, top-k, top-p) and beam search: `mesh_tensorflow.decoding`.
"""
