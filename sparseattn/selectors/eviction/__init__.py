"""Methods that drop rows for good, by the attention that these have received: H2O, TOVA, SnapKV, PyramidKV."""
