"""Whole programs: `python -m mesh_tensorflow.examples.toy_model --help`, and so on."""
