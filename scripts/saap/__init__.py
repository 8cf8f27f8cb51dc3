"""Remake the SAAP artefact that ships for the built-in reference model.

``GOMP_SPINCOUNT=0 python -m scripts.saap`` from the repository root captures prompts into ``build/saap`` (what is
there already is kept), trains on them and writes ``sparseattn/data/saap/reference.safetensors`` with a card beside it.
Prompts are drawn from other texts and other seeds than the built-in traces that ``bench`` measures on:

* "recall": random spans over an alphabet of 23 to 256 symbols that recur at random distances, with spans of 6 to 48
  bytes and half or more of them recurring; one alphabet and one share of recurrences to a prompt;
* "text": windows of the training text of the reference model (``scripts.reference.text``), with no licence in them;
* "mixed": such text in pieces, some of which recur.

``python -m scripts.saap.study`` then measures what it finds on prompts of other kinds, its ablations and its buckets.
"""
