"""Models and their programs on a mesh; `transformer.py` has the old names.

unitransformer, bitransformer, student_teacher, funnel_transformer   whole models
layer_stack, sublayers, deepnorm, universal_stack, universal_passes   what holds layers together
layers, attention, moe      what a stack is made of
vocab_embedding, token_loss, sequence_utils         ids to vectors, and the loss
context                     what a layer is told of the call it is part of
decoding, decoding_states, generation   KV caches; text by sampling and search
model_building, model_features   a model of the gin configuration, and what it is fed
model_steps, step_sums, evaluation, forward   what a mesh computes of it
mesh_setup, batching        devices, layout, sizes of batches
"""
