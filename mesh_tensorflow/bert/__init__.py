"""BERT (Devlin et al., 2018, arXiv:1810.04805) on a mesh: the model, its data, and its programs.

    bert                 the model: `BertConfig`, `BertModel`; config, heads and layers beside it
    tokenization         text to WordPieces; `make_vocab` makes a vocabulary from text
    create_pretraining_data   text files to records: masked LM, next sentence
    run_pretraining, run_classifier, run_squad   the programs, each with its flags
    optimization         learning rate, clipping, the choice of variables
    checkpoint_names, convert   weights of Google's and Hugging Face's BERT, both ways
    training, settings, program_flags   what the programs share: the loop, mesh, data; flags

Programs are run as modules: `python -m mesh_tensorflow.bert.run_pretraining --help`.
"""
