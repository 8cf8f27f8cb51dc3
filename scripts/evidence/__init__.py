"""Remakes every measurement of the documents, and draws the documents from the records of it.

``python -m scripts.evidence --list`` from the repository root prints the steps, what is there and the hours of the
rest; ``python -m scripts.evidence`` runs what is missing. A step is a command of the package or of `benchmarks/`
(`steps.toml`); it works in ``build/evidence`` and leaves one record, ``benchmarks/results/NAME.json``, and a line in
``made.json`` beside it: by which command, when and in how many seconds. A step whose record stands there by the same
command is skipped, so a run that was stopped goes on where it was. Half of a step is kept where its command resumes
(eval, training); the others begin that step anew.

Tables of documents (`tables.toml`), numbers within their sentences, what sentences claim, and pictures
(`pictures.toml`) come from records; `documents.py` says how they are marked. ``--documents`` draws them alone,
``--check`` says what differs or does not hold.
"""
