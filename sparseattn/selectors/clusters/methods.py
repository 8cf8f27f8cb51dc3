"""Methods that search buckets of keys, a row each: text alone, see `sparseattn.selectors.methods`."""

from __future__ import annotations

from sparseattn.selectors.method_row import MethodRow

METHODS = {
    "kmeans": MethodRow(
        "clusters.kmeans:KMeans",
        "baseline of SAAP, 2502.08246",
        reads="the buckets with the nearest centroids",
        faithful="all tokens of the nearest buckets",
        departs="how the query heads of a group vote",
        scans="the centroids",
        builds="the nearest centroid of each key",
        needs="centroids of an artefact",
    ),
    "saap": MethodRow(
        "clusters.saap:SAAP",
        "2502.08246",
        reads="the buckets that a trained classifier picks",
        faithful="k-means buckets, a trained classifier, one probe per query group",
        departs="a linear path in the classifier, because prompts for training were few; a budget may cut the last "
        "bucket; `context=` is ours",
        scans="the classifier",
        builds="the nearest centroid of each key",
        needs="an artefact trained for the model",
    ),
    "moments": MethodRow(
        "clusters.moments:Moments",
        "ours, after SAAP, 2502.08246",
        reads="the buckets whose keys in this context promise the largest logits",
        faithful="SAAP's buckets",
        departs="ranked by mean and variance of this context's keys, so that no classifier is needed",
        scans="the moments of each bucket",
        builds="the nearest centroid of each key, mean and variance of each bucket",
        needs="centroids of an artefact",
    ),
    "retroinfer": MethodRow(
        "clusters.retroinfer:RetroInfer",
        "2505.02922",
        reads="clusters of this prompt's keys; the next clusters are approximated by their means",
        faithful="spherical k-means in segments of 8,192 keys less their mean, 16 keys per cluster, a share `zone` of "
        "the clusters estimated",
        departs="a budget of rows and not of clusters, as for all methods; sizes count when clusters to estimate are "
        "chosen; no buffer between GPU and CPU, which affects only speed",
        scans="the centroid of each cluster",
        builds="10 rounds of k-means in each segment",
        runs="torch",
    ),
    "louver": MethodRow(
        "clusters.louver:Louver",
        "2605.06763",
        reads="every token whose product with the query reaches a threshold, found by balls of keys",
        faithful="parts of channels, balanced clusters of four keys, the sweep and its stop, thresholds by a sample",
        departs="bounds are those of balls, so that none is missed, where the authors' kernels take means "
        "(`ball=False`); the budget caps what is read; `threshold=mass` is ours; its body could not be read, its code "
        "could",
        scans="a mean of each cluster, the sample's keys, the keys of clusters that are taken",
        builds="clusters of keys in each part of the channels",
        runs="torch",
    ),
}
