"""lm-evaluation-harness (`lm_eval`) with sparse decoding: a model of it, and a server that is asked and counted."""
