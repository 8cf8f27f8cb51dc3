"""Methods that sort keys into clusters and visit the best ones: SAAP, k-means, RetroInfer."""
