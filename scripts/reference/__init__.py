"""Train, export and evaluate the built-in reference model of sparseattn.

The reference model is a small byte-level ``LlamaForCausalLM`` (a token is a byte, so it needs no tokenizer). It is
trained to retrieve: its attention must contain induction heads that find the earlier occurrence of the bytes at hand
at distances of thousands of tokens, because benchmarks of sparse attention mean nothing on a model that never looks
far back.

How it is taught to retrieve:

* Sequences hold spans copied from *random* earlier places. With fixed offsets the model learns the offset, which is a
  positional shortcut, and never compares contents. Loss on a copy starts at its second token, since nothing predicts
  the first.
* Alphabets vary from 8 to 256 bytes between sequences. In a small alphabet one byte occurs many times, so that the
  model must match on several bytes; with 256 bytes and short sequences matching on one would do, and would then fail
  in a long context.
* A few heads' attention is guided by a loss of its own: seven heads of layer 0 to the bytes 1 to 7 back, four heads of
  layers 1 and 2 to where the span at hand went on before. Both halves of an induction circuit are useless without the
  other, which is why it takes long to appear by itself; guided, it is there after 300 steps, and matches several bytes
  at once, which it had not learned to do by step 2,100 without. Eight bytes are a key of six letters and its colon.
* Texts end with questions about themselves, as `sparseattn eval` asks: records, of which some have keys that resemble
  each other, pass keys, and named numbers. Several questions to a text, so that a step teaches several lookups.
* Distances grow through gaps in ``position_ids`` between spans (never inside one): a sequence of 128 tokens then spans
  thousands of positions at the cost of 128. Later stages use longer sequences, since gaps stretch distances but add no
  keys that compete.
* Text (source code and documentation found on this machine) is mixed in, plain and with recurring spans.

Run ``GOMP_SPINCOUNT=0 python -m scripts.reference`` from the repository root to train (it resumes from ``--work-dir``
when that holds a state), and ``python -m scripts.reference --eval-only`` to print the figures of the exported weights
again. The variable keeps OpenMP's threads from spinning at barriers: where another process wants the cores too, steps
took seven times as long without it.
"""
