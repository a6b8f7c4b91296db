"""The Transformer's `Trainer`.

    trainer          a model with its folder and its data: training, evaluation, prediction
    layer_mapping    initial checkpoints of a model that numbers its layers differently
    running_metrics  metrics over several batches, under the names of the TF1 library

The loop is that of all trainings, `mesh_tensorflow.training`.
"""
