"""Codebooks of product quantisation, by k-means in each part of the channels. https://doi.org/10.1109/TPAMI.2010.57"""
