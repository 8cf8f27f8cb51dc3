"""The SAAP artefact file: what is written is read, and what is no such file or of another model is refused."""

from __future__ import annotations

import errno
import hashlib
import importlib.resources
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.saap_artefact import Artefact, locate, shipped_for
from sparseattn.selectors.parameters.saap_partition import ArtefactError, Classifier, Partition
from sparseattn.utils.hashing import tensors_hash
from sparseattn.utils.tensor_files import content_hash

HEADS, GROUP, SIZE, BUCKETS, HIDDEN = 2, 3, 8, 5, 7
THETA = 1e7  # of the reference model


def classifier(heads: int = HEADS, skip: bool = False) -> Classifier:
    return Classifier(
        torch.randn(heads, HIDDEN, SIZE),
        torch.randn(heads, HIDDEN),
        torch.randn(heads, BUCKETS, HIDDEN),
        torch.randn(heads, BUCKETS),
        torch.randn(heads, BUCKETS, SIZE) if skip else None,
    )


def partition(**options: Any) -> Partition:
    centroids = torch.nn.functional.normalize(torch.randn(HEADS, BUCKETS, SIZE), dim=-1)
    return Partition(centroids, classifier(**options))


@pytest.fixture
def artefact() -> Artefact:
    turn, other = Rope.of(SIZE), Rope(Rope.of(SIZE, 5e5).inv_freq, scaling=1.25, interleaved=True)
    layers = {3: partition(skip=True), 1: partition(heads=HEADS * GROUP), 2: Partition(partition().centroids, None)}
    meta = {"model": "toy", "group": GROUP, "recipe": {"seed": 1}}
    return Artefact(layers, ropes={1: turn, 2: turn, 3: other}, meta=meta)


def test_what_is_saved_is_loaded(artefact: Artefact, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    artefact.save(path)
    again = Artefact.load(path)
    assert tuple(again.layers) == (1, 2, 3)
    assert (again.roped, again.meta) == (artefact.roped, artefact.meta)
    for index, mine in artefact.layers.items():
        theirs = again.layers[index]
        torch.testing.assert_close(theirs.centroids, mine.centroids, rtol=1e-6, atol=1e-7)  # normalised once more
        assert (theirs.classifier is None) == (mine.classifier is None)
        if mine.classifier is not None and theirs.classifier is not None:
            for name, tensor in mine.classifier.tensors().items():
                assert theirs.classifier.tensors()[name].equal(tensor)
        a, b = artefact.ropes[index], again.ropes[index]
        assert a.inv_freq.equal(b.inv_freq)
        assert (a.scaling, a.interleaved) == (b.scaling, b.interleaved)
        again.check(index, HEADS, GROUP, SIZE, a)
    with safe_open(path, framework="pt") as file:
        assert sorted(name for name in file.keys() if name.startswith("rope.")) == [  # noqa: SIM118
            "rope.0.inv_freq",
            "rope.1.inv_freq",
        ]
        assert json.loads(file.metadata()["layers"])[2] == {"index": 3, "rope": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_in_memory(artefact: Artefact, dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    artefact.save(path, dtype)
    assert all(t.dtype == dtype for name, t in load_file(path).items() if name.startswith("layers"))
    again = Artefact.load(path)
    mine, theirs = artefact.layers[3], again.layers[3]
    assert mine.classifier is not None
    assert theirs.classifier is not None
    assert {t.dtype for t in (theirs.centroids, *theirs.classifier.tensors().values())} == {torch.float32}
    torch.testing.assert_close(theirs.centroids.norm(dim=-1), torch.ones(HEADS, BUCKETS))
    torch.testing.assert_close(theirs.classifier.w2, mine.classifier.w2, rtol=2**-8, atol=1e-6)


def test_logits_are_those_of_the_loop() -> None:
    for skip in (False, True):
        net = classifier(skip=skip)
        queries = torch.randn(4, HEADS, 6, SIZE)
        logits = net.logits(queries)
        assert logits.shape == (4, HEADS, 6, BUCKETS)
        for b in range(4):
            for a in range(HEADS):
                for n in range(6):
                    q = queries[b, a, n]
                    expected = net.w2[a] @ (net.w1[a] @ q + net.b1[a]).clamp(min=0) + net.b2[a]
                    if net.skip is not None:
                        expected = expected + net.skip[a] @ q
                    torch.testing.assert_close(logits[b, a, n], expected, rtol=1e-4, atol=1e-5)


def test_keys_go_to_the_bucket_of_the_largest_product() -> None:
    part = partition()
    keys = torch.randn(3, HEADS, 11, SIZE, dtype=torch.float64).bfloat16()
    expected = torch.einsum("bhnd,hcd->bhnc", keys.float(), part.centroids).argmax(-1)
    assert part.assign(keys).equal(expected)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"layer": 7}, "holds layers 1, 2, 3, layer 7 is asked for"),
        ({"heads": 4}, "for 2 KV heads with 3 query heads each of size 8, layer 1 here has 4 with 3 of size 8"),
        ({"group": 1}, "for 2 KV heads with 3 query heads each of size 8, layer 1 here has 2 with 1 of size 8"),
        ({"size": 16}, "for 2 KV heads with 3 query heads each of size 8, layer 1 here has 2 with 3 of size 16"),
        ({"rope": None}, r"trained with a RoPE of 8 dimensions \(halves.+\), layer 1 here applies no RoPE"),
        ({"rope": Rope.of(SIZE, 5e5)}, "slowest 0.001 radians, .+ here applies .+, slowest 5.318e-05 radians"),
        ({"rope": Rope(Rope.of(SIZE).inv_freq, 2.0)}, r"scaling 1\), layer 1 here applies .+scaling 2\)"),
        ({"rope": Rope(Rope.of(SIZE).inv_freq, interleaved=True)}, r"\(halves.+ here applies .+\(interleaved"),
        ({"rope": Rope.of(4)}, "a RoPE of 8 dimensions .+ here applies a RoPE of 4 dimensions"),
    ],
)
def test_another_model_is_refused(artefact: Artefact, given: dict[str, Any], sentence: str) -> None:
    fits = {"layer": 1, "heads": HEADS, "group": GROUP, "size": SIZE, "rope": Rope.of(SIZE)}
    assert artefact.check(**fits) is artefact.layers[1]
    with pytest.raises(ArtefactError, match=sentence):
        artefact.check(**(fits | given))


@pytest.mark.parametrize(("name", "heads", "group", "layers"), [("reference", 2, 4, 4), ("smollm2", 3, 3, 30)])
def test_what_ships_is_found_by_its_models_name(name: str, heads: int, group: int, layers: int) -> None:
    """By name, by the RoPE of a layer, and by the sentence that refuses another artefact for such a layer."""
    held = Artefact.load(name)
    assert tuple(held.layers) == tuple(range(layers))
    assert locate(name).stat().st_size <= 20_000_000
    assert hashlib.sha256(locate(name).read_bytes()).hexdigest() in (locate(name).parent / "README.md").read_text()
    assert held.roped == (name == "smollm2")
    rope = held.ropes[1]
    assert shipped_for(rope) == name
    held.check(1, heads, group, 64, rope)
    other = Artefact.load({"reference": "smollm2", "smollm2": "reference"}[name])
    for given in ({"heads": heads}, {"heads": heads, "group": None}, {"heads": heads + 1}):
        asked = {"layer": 1, "group": group, "size": 64, "rope": rope} | given
        with pytest.raises(ArtefactError) as refused:
            other.check(**asked)
        assert str(refused.value).endswith(f"; artefact={name}, which ships, is for such a layer") == (
            given["heads"] == heads
        )


def test_no_artefact_that_ships_is_for_this_layer() -> None:
    for rope, said in ((None, "no RoPE"), (Rope.of(SIZE), "a RoPE of 8 dimensions")):
        with pytest.raises(
            ArtefactError, match=rf"no artefact that ships \(reference, smollm2\) is for .+{said}.+train"
        ):
            shipped_for(rope)


def test_frequencies_may_differ_by_rounding(artefact: Artefact) -> None:
    near = Rope(Rope.of(SIZE).inv_freq * (1 + 2e-7))
    artefact.check(1, HEADS, GROUP, SIZE, near)


def test_damaged_files_are_refused(artefact: Artefact, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    artefact.save(path)
    whole = path.read_bytes()
    for part in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:part])
        with pytest.raises(ArtefactError, match=r"a.safetensors is damaged or not an artefact"):
            Artefact.load(path)
    changed = bytearray(whole)
    changed[-3] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ArtefactError, match="its tensors or metadata are not those that were written"):
        Artefact.load(path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [("meta", '{"model": "another"}'), ("roped", "true"), ("ropes", "[]"), ("layers", "[]"), ("more", "words")],
)
def test_metadata_edited_by_hand_is_refused(artefact: Artefact, entry: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    artefact.save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, {**metadata, entry: said})
    with pytest.raises(ArtefactError, match=r"a\.safetensors is damaged: its tensors or metadata are not those that"):
        Artefact.load(path)


def test_tensors_may_share_memory(tmp_path: Path) -> None:
    one = partition()
    Artefact({0: one, 3: one}, ropes={0: Rope.of(SIZE), 3: Rope.of(SIZE)}).save(tmp_path / "a.safetensors")
    layers = Artefact.load(tmp_path / "a.safetensors").layers
    assert torch.equal(layers[0].centroids, layers[3].centroids)


def rewritten(path: Path, change: Callable[[dict[str, str], dict[str, Tensor]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(metadata, tensors)
    metadata["sha256"] = content_hash(tensors, metadata)
    save_file(tensors, path, metadata)


def spoilt(tensor: Tensor, number: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = number
    return tensor


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m, t: m.update(format="sparseattn-trace"), "is a safetensors file, but not an artefact"),
        (lambda m, t: m.update(version="3"), "but of version 3; this sparseattn reads 1 and 2"),
        (lambda m, t: m.pop("version"), "but of version None; this sparseattn reads 1 and 2"),
        (lambda m, t: m.pop("ropes"), "damaged artefact: ropes is missing in its metadata"),
        (lambda m, t: m.update(meta="[]"), "damaged artefact: it holds what no artefact has"),
        (lambda m, t: t.update(more=torch.zeros(1)), "damaged artefact: it holds what no artefact has"),
        (lambda m, t: t.pop("layers.1.classifier.w2"), "damaged artefact: its metadata and tensors do not fit"),
        (lambda m, t: t.update({"layers.1.classifier.b2": torch.zeros(1, 2)}), "damaged artefact: a classifier is w1"),
        (lambda m, t: t.update({"layers.2.centroids": torch.zeros(1)}), r"centroids are \[H,C,D\], got \[1\]"),
        *(
            (
                lambda m, t, name=name, number=number: t.update({name: spoilt(t[name], number)}),
                rf"damaged artefact: {name} has numbers that are not finite in torch\.float32",
            )
            for name in ("layers.2.centroids", "layers.1.classifier.w1", "layers.3.classifier.skip", "rope.0.inv_freq")
            for number in (math.nan, math.inf)
        ),
        (
            lambda m, t: t.update({"layers.2.centroids": t["layers.2.centroids"].to(torch.float8_e4m3fn)}),
            r"tensors are float32, float16 or bfloat16, layers\.2\.centroids is torch\.float8_e4m3fn",
        ),
    ],
)
def test_files_that_are_whole_but_wrong(
    artefact: Artefact, change: Callable[..., None], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    artefact.save(path)
    rewritten(path, change)
    with pytest.raises(ArtefactError, match=sentence):
        Artefact.load(path)


def of_version_1(path: Path) -> None:
    """Makes it what was written before metadata was under the hash."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del metadata["sha256"]
    save_file(tensors, path, {**metadata, "version": "1", "tensors": tensors_hash(tensors)})


def test_version_1_is_read_with_a_warning(artefact: Artefact, tmp_path: Path) -> None:
    path, whole = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    artefact.save(path, torch.float16)
    shutil.copy(path, whole)
    of_version_1(path)
    with pytest.warns(
        UserWarning, match=r"a\.safetensors is an artefact of version 1, whose hash leaves out its metadata"
    ):
        old = Artefact.load(path)
    old.save(path, torch.float16)
    again, kept = load_file(path), load_file(whole)
    assert again.keys() == kept.keys()
    assert all(again[name].equal(kept[name]) for name in kept)
    assert Artefact.load(path).meta == artefact.meta  # no warning any more


def test_version_1_of_other_tensors_is_refused(artefact: Artefact, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    artefact.save(path)
    of_version_1(path)
    changed = bytearray(path.read_bytes())
    changed[-3] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ArtefactError, match="is damaged: its tensors are not those that were written"):
        Artefact.load(path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_a_full_disk_names_the_file(
    artefact: Artefact, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "a.safetensors"
    with pytest.raises(ArtefactError, match=f"^{re.escape(str(path))} cannot be written: {os.strerror(number)}$"):
        artefact.save(path)
    assert not list(tmp_path.iterdir())


def test_sentences_of_other_mistakes(artefact: Artefact, tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"no artefact file .+ nor one that ships \(reference, smollm2\)"):
        Artefact.load(tmp_path / "none.safetensors")
    with pytest.raises(ArtefactError, match=r"stored as float32, float16 or bfloat16, got torch\.int8"):
        artefact.save(tmp_path / "a.safetensors", torch.int8)
    with pytest.raises(ArtefactError, match="cannot be written: No such file or directory"):
        artefact.save(tmp_path / "no" / "a.safetensors")
    with pytest.raises(ArtefactError, match="at least one layer"):
        Artefact({})
    with pytest.raises(ArtefactError, match="layer 0 is de-roped, so the artefact needs its RoPE"):
        Artefact({0: partition()})
    with pytest.raises(ArtefactError, match="has a multiple of 2 heads, 5 buckets and size 8, got 3, 5 and 8"):
        partition(heads=3)
    big = Partition(partition().centroids, Classifier(*(t * 1e6 for t in classifier().tensors().values())))
    with pytest.raises(ArtefactError, match=r"classifier\.w1 has numbers that are not finite in torch.float16"):
        Artefact({0: big}, roped=True).save(tmp_path / "a.safetensors", torch.float16)
    with pytest.raises(ArtefactError, match="meta is what JSON can hold"):
        Artefact({0: partition()}, roped=True, meta={"x": float("nan")}).save(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_roped_artefact_needs_no_rope(tmp_path: Path) -> None:
    Artefact({0: partition()}, roped=True).save(tmp_path / "a.safetensors")
    again = Artefact.load(tmp_path / "a.safetensors")
    assert again.roped
    again.check(0, HEADS, GROUP, SIZE, None)


def test_what_ships() -> None:
    path = Path(str(importlib.resources.files("sparseattn"))) / "data" / "saap" / "reference.safetensors"
    assert path.stat().st_size < 4_500_000
    assert hashlib.sha256(path.read_bytes()).hexdigest() in (path.parent / "README.md").read_text()
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["version"] == "2"
    shipped = Artefact.load("reference")
    assert (tuple(shipped.layers), shipped.roped, shipped.meta["model"]) == (
        (0, 1, 2, 3),
        False,
        "sparseattn-reference",
    )
    for index in shipped.layers:
        assert shipped.check(index, 2, 4, 64, Rope.of(64, THETA)).classifier is not None
    config = json.loads((path.parents[1] / "reference" / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == THETA
