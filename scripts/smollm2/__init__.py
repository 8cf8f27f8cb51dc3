"""Train and judge the SAAP artefact that ships for SmolLM2.

``python -m scripts.smollm2`` from the repository root captures windows of the training texts (what is there already is
kept), trains on them and writes ``sparseattn/data/saap/smollm2.safetensors``. ``python -m scripts.smollm2.judge`` then
measures it on texts and kinds that nothing was trained on. Both go on where they were stopped.
"""
