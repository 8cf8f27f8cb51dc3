"""Methods that drop rows for good, by the attention that these have received: H2O, A2SF, Keyformer, Scissorhands, TOVA,
SnapKV, ZipCache, PyramidKV."""
