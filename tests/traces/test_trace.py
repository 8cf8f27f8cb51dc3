"""Traces: files round-trip, are written in pieces, and appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseattn.core.rope import Rope
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import LayerShape, Trace, TraceError, TraceLayer
from sparseattn.traces.trace_format import NAMES
from sparseattn.traces.trace_writer import TraceWriter
from sparseattn.utils import files
from sparseattn.utils.files import replacing, write_atomic

T = 37


def layer(index: int, heads: int = 2, group: int = 3, size: int = 8, dtype: torch.dtype = torch.float32) -> TraceLayer:
    draw = torch.Generator().manual_seed(index)
    return TraceLayer(
        index,
        torch.randn(heads, group, T, size, generator=draw).to(dtype),
        torch.randn(heads, T, size, generator=draw).to(dtype),
        torch.randn(heads, T, size, generator=draw).to(dtype),
        scale=0.1 + index,
        rope=Rope.of(size) if index == 0 else Rope(torch.ones(2), 1.5, interleaved=True) if index == 3 else None,
        window=16 if index == 3 else None,
    )


def trace(*layers: TraceLayer) -> Trace:
    return Trace.build(layers, torch.arange(T) + 5, {"model": "none", "note": "é"})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    trace(layer(0), layer(1), layer(3)).save(path)
    return path


def assert_same(a: TraceLayer, b: TraceLayer) -> None:
    for name in NAMES:
        assert torch.equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype
    assert (a.index, a.scale, a.window) == (b.index, b.scale, b.window)
    assert (a.rope is None) == (b.rope is None)
    if a.rope is not None and b.rope is not None:
        assert torch.equal(a.rope.inv_freq, b.rope.inv_freq)
        assert (a.rope.scaling, a.rope.interleaved) == (b.rope.scaling, b.rope.interleaved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "t.safetensors"
    layers = [layer(0, dtype=dtype), layer(1, heads=1, group=1, size=80, dtype=dtype), layer(3, dtype=dtype)]
    trace(*layers).save(path)
    read = Trace.open(path)
    assert (read.tokens, read.layers, read.name) == (T, (0, 1, 3), "t")
    assert torch.equal(read.positions, torch.arange(T) + 5)
    assert read.meta == {"model": "none", "note": "é"}
    for written in layers:
        assert_same(read.layer(written.index), written)


def test_any_safetensors_reader_opens_it(saved: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(saved)
    assert torch.equal(tensors["layers.1.keys"], layer(1).keys)
    assert tensors["rope.1.inv_freq"].tolist() == [1.0, 1.0]


def test_queries_of_the_last_tokens_alone(tmp_path: Path) -> None:
    full = layer(1)
    last = TraceLayer(1, full.query[:, :, -5:].contiguous(), full.keys, full.values, full.scale)
    trace(last).save(tmp_path / "q")
    assert_same(Trace.open(tmp_path / "q").layer(1), last)


def test_the_first_tokens_of_a_trace() -> None:
    whole = synthetic(120, heads=2, group=3, size=16, clusters=4, layers=2, queries=30)
    cut = whole.first(100)
    assert (cut.name, cut.tokens, cut.layers, cut.shapes[1].queries) == (whole.name, 100, (0, 1), 10)
    for index in cut.layers:
        a, b = cut.layer(index), whole.layer(index)
        assert torch.equal(a.query, b.query[:, :, :10]), "the queries of tokens 90 to 99"
        assert torch.equal(a.keys, b.keys[:, :100])
        assert torch.equal(a.values, b.values[:, :100])
        assert (a.scale, a.rope, a.shape) == (b.scale, b.rope, cut.shapes[index])
    assert torch.equal(cut.positions, whole.positions[:100])
    assert whole.first(120) is whole
    for tokens in (0, 121):
        with pytest.raises(TraceError, match=f"has 120 tokens, its first {tokens} are not"):
            whole.first(tokens)
    with pytest.raises(TraceError, match="holds the queries of its last 30 tokens of 120, none of them is among the"):
        whole.first(90)


def test_pieces_of_any_size_make_the_same_file(saved: Path, tmp_path: Path) -> None:
    layers = [layer(0), layer(1), layer(3)]
    path = tmp_path / "pieces"
    with TraceWriter(
        path, [x.shape for x in layers], torch.arange(T) + 5, torch.float32, {"model": "none", "note": "é"}
    ) as writer:
        for start in range(0, T, 5):
            for x in layers:
                for name in reversed(NAMES):
                    writer.write(x.index, name, start, getattr(x, name)[..., start : start + 5, :])
        for x in layers:
            writer.rope(x.index, x.rope)
        assert not path.exists()
    assert path.read_bytes() == saved.read_bytes()
    assert path.stat().st_mode == saved.stat().st_mode


def one_layer(path: Path, tokens: int = T) -> TraceWriter:
    return TraceWriter(path, [LayerShape(0, 2, 3, 8, 1.0)], torch.arange(tokens), torch.float32)


def test_rows_missing_or_out_of_order_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"layers.0.query has 10 of 37 rows"), one_layer(tmp_path / "x") as writer:
        writer.write(0, "query", 0, torch.zeros(2, 3, 10, 8))
    with pytest.raises(TraceError, match=r"takes rows 0 and up .* at row 3"), one_layer(tmp_path / "x") as writer:
        writer.write(0, "keys", 3, torch.zeros(2, 10, 8))
    with pytest.raises(TraceError, match=r"got \[2, 38, 8\]"), one_layer(tmp_path / "x") as writer:
        writer.write(0, "keys", 0, torch.zeros(2, 38, 8))
    with pytest.raises(KeyboardInterrupt):
        interrupted(one_layer(tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


def interrupted(unopened: TraceWriter) -> None:
    with unopened as writer:
        writer.write(0, "keys", 0, torch.zeros(2, 10, 8))
        raise KeyboardInterrupt


def test_an_old_file_stays_when_a_new_one_fails(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        interrupted(one_layer(saved))
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_disk_known_to_be_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(TraceError, match=r"needs [\d,]+ bytes, .* has 1,000 free"):
        trace(layer(0)).save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the file system is asked through posix_fallocate")
def test_a_disk_that_cannot_reserve_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TraceError, match=r"needs [\d,]+ bytes, .* has [\d,]+ free"):
        trace(layer(0)).save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the file system is asked through posix_fallocate")
def test_a_file_system_that_never_reserves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    trace(layer(0)).save(tmp_path / "x")
    assert_same(Trace.open(tmp_path / "x").layer(0), layer(0))


def test_a_disk_that_fills_on_the_way(tmp_path: Path) -> None:
    class Full:
        """A file that takes no more bytes."""

        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    def fill() -> None:
        with one_layer(tmp_path / "x") as writer:
            writer._file = Full(writer._file)  # type: ignore[assignment]
            writer.write(0, "keys", 0, torch.zeros(2, 10, 8))

    with pytest.raises(TraceError, match=r"needs [\d,]+ bytes, .* has [\d,]+ free"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone.x cannot be written: No such file or directory"):
        trace(layer(0)).save(tmp_path / "gone" / "x")
    with pytest.raises(TraceError, match="is a folder, not a place for a trace file"):
        trace(layer(0)).save(tmp_path)


# Writes a long file chunk by chunk, says by how many MiB its memory grew, and is killed while it writes a second file.
WRITER = """
import os, resource, signal, sys, torch
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import LayerShape
from sparseattn.traces.trace_writer import TraceWriter
tokens, chunk = 20480, 1024
keys, query = torch.ones(4, chunk, 128), torch.ones(4, 4, chunk, 128)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
shapes = [LayerShape(0, 4, 4, 128, 1.0)]
with TraceWriter(sys.argv[1], shapes, torch.arange(tokens), torch.bfloat16) as writer:
    before = None
    for start in range(0, tokens, chunk):
        writer.write(0, "query", start, query)
        writer.write(0, "keys", start, keys)
        writer.write(0, "values", start, keys)
        before = before or peak()
print(peak() - before, flush=True)
with TraceWriter(sys.argv[2], [LayerShape(0, 2, 3, 8, 1.0)], torch.arange(100), torch.float32) as writer:
    writer.write(0, "keys", 0, torch.zeros(2, 50, 8))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, Path]:
    """What the process `WRITER` left: its long file, by how many MiB it grew, the file that it was killed over."""
    whole, cut = (tmp_path_factory.mktemp(name) / "x.safetensors" for name in ("whole", "cut"))
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(whole), str(cut)], check=False, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode < 0
    return whole, int(done.stdout), cut


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_what_a_killed_writer_left_goes_with_the_next_one(
    killed: tuple[Path, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = killed[2]
    tmp_path = path.parent
    assert not path.exists()
    (left,) = tmp_path.iterdir()
    assert left.stat().st_size > 2 * 5 * 100 * 8 * 4, "of full size"
    gone = tmp_path / left.name.replace(".x.", ".y.")  # of another file
    others = [tmp_path / name for name in (".x.safetensors.00c0ffee-01234567.part", left.name[1:], "notes.part")]
    for other in (gone, *others):  # the others are of another host and anybody's
        other.write_bytes(b"")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0) if left.exists() else usage)
    trace(layer(0)).save(path)
    assert_same(Trace.open(path).layer(0), layer(0))
    assert set(tmp_path.iterdir()) == {path, *others}


def test_what_a_living_process_is_writing_stays(tmp_path: Path) -> None:
    """Of this process and of another one: both end with their own bytes, the last one's stay; so with another file."""
    path = tmp_path / "x"
    code = "import sys; from sparseattn.utils.files import write_atomic; write_atomic(sys.argv[1], b'other')"
    with replacing(path) as slow:
        slow.write(b"slow")
        write_atomic(path, b"fast")
        assert path.read_bytes() == b"fast"
        subprocess.run([sys.executable, "-c", code, str(path)], check=True)
        assert path.read_bytes() == b"other"
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "y")], check=True)
    assert path.read_bytes() == b"slow"
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "y"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=f"it is no file.*{name}"):
            write_atomic(tmp_path / name, b"bytes")
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path, b"bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_taken_for_abandoned_before_it_is_held_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = files.take_lock, []

    def late(file: Any, wait: bool = False) -> files.Lock:
        if wait and not taken:
            taken.append(Path(file.name))
            taken[0].unlink()
        return real(file, wait)

    monkeypatch.setattr(files, "take_lock", late)
    write_atomic(tmp_path / "x", b"new")
    assert len(taken) == 1
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"new"]


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss differs between systems")
def test_memory_does_not_grow_with_the_length(killed: tuple[Path, int, Path]) -> None:
    path, grew, _ = killed
    assert path.stat().st_size > 115 * 2**20
    assert grew < 40  # MiB, for a file of more than 115


def test_opening_reads_no_rows(saved: Path) -> None:
    # Rows overwritten behind an open trace are what a layer shows when it is asked for.
    opened = Trace.open(saved)
    header = int.from_bytes(saved.read_bytes()[:8], "little")
    with saved.open("r+b") as file:
        file.seek(8 + header)
        file.write(b"\0" * 64)
    assert not opened.layer(0).query[0, 0, :2].any()
    with pytest.raises(TraceError, match="a has no layer 2, it holds 0, 1, 3"):
        opened.layer(2)


def edited(path: Path, change: dict[str, str | None]) -> None:
    """Rewrite a file with some of its metadata changed, or removed where None."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() | change
    save_file(load_file(path), path, {k: v for k, v in metadata.items() if v is not None})


def test_files_that_are_no_traces(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(TraceError, match="does not exist"):
        Trace.open(tmp_path / "gone")
    with pytest.raises(TraceError, match="is a folder, not a trace file"):
        Trace.open(tmp_path)
    other = tmp_path / "other"
    for junk in (b"", b"{}", b"hello world, not a trace", b"\x10" + b"\0" * 7 + b'{"a": ["b", 1]} ', os.urandom(5000)):
        other.write_bytes(junk)
        with pytest.raises(TraceError, match="is not a safetensors file"):
            Trace.open(other)
    save_file({"x": torch.zeros(3)}, other)
    with pytest.raises(TraceError, match="is a safetensors file, but not a trace"):
        Trace.open(other)
    edited(saved, {"version": "7"})
    with pytest.raises(TraceError, match="version 7, this sparseattn reads version 1"):
        Trace.open(saved)


def flipped(path: Path, name: str) -> None:
    """Change one bit in the middle of a tensor."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8 : 8 + size])[name]["data_offsets"]
    data[8 + size + (start + end) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_bit_in_a_layer_is_met_by_its_hash(saved: Path, name: str) -> None:
    Trace.open(saved).verify()
    flipped(saved, f"layers.1.{name}")
    opened = Trace.open(saved)
    for whole in (0, 3):
        opened.verify(whole)
    others = [other for other in NAMES if other != name]
    opened.verify(1, others)
    for again in (lambda: opened.verify(1), opened.verify):
        with pytest.raises(TraceError, match=rf"a.safetensors is a damaged trace: its layers.1.{name} is not what was"):
            again()
    with pytest.raises(TraceError, match="a has no layer 2"):
        opened.verify(2)


def test_what_was_found_right_is_not_read_again(saved: Path) -> None:
    opened = Trace.open(saved)
    opened.verify(1, ["query", "keys"])
    for name in ("query", "values"):
        flipped(saved, f"layers.1.{name}")
    opened.verify(1, ["query", "keys"])
    with pytest.raises(TraceError, match=r"layers\.1\.values"):
        opened.verify(1)


@pytest.mark.parametrize("name", ["positions", "rope.1.inv_freq"])
def test_a_changed_bit_in_positions_or_ropes_is_met_when_a_trace_is_opened(saved: Path, name: str) -> None:
    flipped(saved, name)
    with pytest.raises(TraceError, match=f"a.safetensors is a damaged trace: its {name} is not what was written"):
        Trace.open(saved)


def test_the_hash_is_the_documented_one(saved: Path) -> None:
    query = layer(1).query
    heads = b"".join(hashlib.sha256(head.numpy().tobytes()).digest() for head in query.flatten(0, 1))
    expected = hashlib.sha256(b"layers.1.query F32 [2, 3, 37, 8]" + heads).hexdigest()
    hashes = Trace.open(saved).hashes
    assert hashes is not None
    assert hashes["layers.1.query"] == expected
    assert len(set(hashes.values())) == 3 * 3 + 1 + 2, "layers, positions and ropes"


def test_a_trace_of_an_earlier_release_has_no_hashes(saved: Path) -> None:
    edited(saved, {"hashes": None})
    opened = Trace.open(saved)
    opened.verify()
    assert opened.hashes is None
    assert trace(layer(0)).hashes is None
    assert_same(opened.layer(3), layer(3))


@pytest.mark.parametrize("left", [4, 100, 70_000, -1, -2000])
def test_truncated(saved: Path, left: int) -> None:
    saved.write_bytes(saved.read_bytes()[:left])
    with pytest.raises(TraceError, match=r"is truncated: it has|is not a safetensors file"):
        Trace.open(saved)


ENTRY = {"index": 0, "scale": 1.0, "window": None, "rope": None}


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ([ENTRY | {"index": 9}], "layer 9 lacks its query and keys and values"),
        ([ENTRY | {"rope": 2}], "layer 0 names rope 2, the file has 2"),
        ([ENTRY | {"rope": -1}], "layer 0 names rope -1, the file has 2"),
        ([ENTRY | {"rope": True}], "layer 0 names rope True, the file has 2"),
        ([ENTRY | {"scale": None}], "layer 0 has scale None, which is not positive and finite"),
        ([ENTRY | {"scale": "1"}], "layer 0 has scale '1'"),
        ([ENTRY | {"scale": float("inf")}], "layers in its metadata: Infinity is no number in JSON"),
        ([ENTRY | {"window": 0}], "layer 0 has window 0"),
        ([ENTRY | {"window": 1.5}], "layer 0 has window 1.5"),
        ([ENTRY, ENTRY], "each once"),
        ([ENTRY | {"index": "0"}], "index is 0 or more, got '0'"),
        ([], "at least one layer"),
        ("nonsense", "do not fit together"),
        ([7], "do not fit together"),
    ],
)
def test_damaged_layers(saved: Path, layers: object, sentence: str) -> None:
    edited(saved, {"layers": json.dumps(layers)})
    with pytest.raises(TraceError, match=f"a.safetensors is a damaged trace: .*{sentence}"):
        Trace.open(saved)


def test_more_than_the_header_says(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"more")
    with pytest.raises(TraceError, match="4 more than its header says"):
        Trace.open(saved)


ROPE = {"scaling": 1.0, "interleaved": False}


@pytest.mark.parametrize(
    "change",
    [
        {"ropes": None},
        {"ropes": "7"},
        *(
            {"ropes": json.dumps([rope, ROPE])}
            for rope in ({}, 7, None, ROPE | {"scaling": "1"}, ROPE | {"scaling": 0})
        ),
        {"ropes": json.dumps([ROPE | {"interleaved": 1}, ROPE])},
        {"ropes": json.dumps([ROPE] * 3)},
        {"meta": "[]"},
        {"meta": "{"},
        {"meta": "[" * 100_000},
        {"meta": '{"attention_differs": 7}'},
        {"meta": '{"attention_differs": {"0": 7}}'},
        {"meta": '{"rope_absent": ["0"]}'},
        {"hashes": "7"},
        {"hashes": "null"},
        {"hashes": "{"},
        {"hashes": "{}"},
    ],
)
def test_damaged_metadata_is_met_when_a_trace_is_opened(saved: Path, change: dict[str, str | None]) -> None:
    edited(saved, change)
    with pytest.raises(TraceError, match=r"a.safetensors is a damaged trace: "):
        Trace.open(saved)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("rope.0.inv_freq", torch.int32, "do not fit together"),
        ("positions", torch.float32, r"positions are integers \[T\], got torch.float32"),
        ("layers.1.keys", torch.float16, "its layers are of F16 and F32"),
    ],
)
def test_damaged_dtypes(saved: Path, name: str, dtype: torch.dtype, message: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    save_file(tensors | {name: tensors[name].to(dtype)}, saved, metadata)
    with pytest.raises(TraceError, match=f"a.safetensors is a damaged trace: .*{message}"):
        Trace.open(saved)


@pytest.mark.parametrize("header", ['{"__metadata__":7}', '{"__metadata__":null}', '{"a":' + "[" * 100_000])
def test_damaged_headers(tmp_path: Path, header: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(TraceError, match="x is not a safetensors file"):
        Trace.open(path)


GOOD = layer(0)
AT = torch.arange(T)


def changed(**parts: Any) -> TraceLayer:
    """A layer that could be stored, but for these of its parts."""
    return TraceLayer(
        **{"index": 0, "query": GOOD.query, "keys": GOOD.keys, "values": GOOD.values, "scale": 1.0} | parts
    )


def written(shapes: list[LayerShape], positions: torch.Tensor = AT, dtype: torch.dtype = torch.float32) -> TraceWriter:
    return TraceWriter("x", shapes, positions, dtype)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (trace, "at least one layer and each once"),
    (lambda: trace(GOOD, GOOD), "each once"),
    (
        lambda: trace(GOOD, layer(1, dtype=torch.float16)),
        "share one dtype, layer 0 has torch.float32 and layer 1 torch.fl",
    ),
    (lambda: Trace.build([GOOD], torch.arange(3)), "layer 0 has 37 tokens for 3 positions"),
    (lambda: Trace.build([GOOD], AT + 0.5), r"positions are integers \[T\], got torch.float32 \[37\]"),
    (lambda: changed(query=GOOD.keys), r"query is \[H,G,T,D\]"),
    (lambda: changed(keys=GOOD.keys[:, :10], values=GOOD.values[:, :10]), "queries of 37 tokens for keys of 10"),
    (
        lambda: changed(values=GOOD.values[..., :7]),
        r"layer 0 has query, keys and .* \[2, 37, 7\], of 37 tokens they are",
    ),
    (lambda: changed(**{name: getattr(GOOD, name)[:0] for name in NAMES}), "layer 0 has heads 0, at least 1 is needed"),
    (lambda: changed(keys=GOOD.keys.double(), values=GOOD.values.double()), "share one dtype"),
    *(
        (lambda scale=scale: changed(scale=scale), f"layer 0 has scale {scale}, which is not positive and finite")
        for scale in (0.0, -1.0, float("inf"), float("nan"))
    ),
    (lambda: changed(window=0), "layer 0 has window 0, which is neither None nor 1 or more"),
    (lambda: changed(index=-1), "index is 0 or more, got -1"),
    (lambda: written([GOOD.shape], dtype=torch.int8), r"got torch\.int8"),
    (lambda: written([GOOD.shape], AT + 0.5), r"positions are integers \[T\], got torch.float32"),
    (lambda: written([GOOD.shape, GOOD.shape]), "each once"),
    (lambda: written([GOOD.shape], AT[:-1]), "queries of 37 tokens for keys of 36"),
    *(
        (lambda meta=meta: Trace.build([GOOD], AT, meta), "meta is what JSON can hold: ")
        for meta in ({"a": float("nan")}, {"a": torch.int8}, {1: 1, "a": 1})
    ),
    *(
        (
            lambda reasons=reasons: Trace.build([GOOD], AT, {"attention_differs": reasons}),
            "attention_differs in its meta is an object of layer numbers and sent",
        )
        for reasons in (7, [], {"0": 7}, None)
    ),
]


@pytest.mark.parametrize(("build", "sentence"), REFUSED)
def test_traces_that_cannot_be_built(build: Callable[[], object], sentence: str) -> None:
    with pytest.raises(TraceError, match=sentence):
        build()


def test_meta_that_json_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    def add() -> None:
        with one_layer(tmp_path / "x", 1) as writer:
            for name in NAMES:
                writer.write(0, name, 0, torch.zeros(2, 3, 1, 8) if name == "query" else torch.zeros(2, 1, 8))
            writer.meta["loss"] = float("nan")  # type: ignore[index]

    with pytest.raises(TraceError, match="meta is what JSON can hold: "):
        add()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (
            1e5,
            torch.float16,
            r"^1e\+05 in layer 0's keys at token 12 is beyond float16, which ends at 6.55e\+04: .*--dtype",
        ),
        (-1e5, torch.float16, r"^1e\+05 in layer 0's keys at token 12 is beyond float16"),
        (torch.nan, torch.float32, r"^the model produced NaN in layer 0's keys at token 12$"),
        (torch.inf, torch.float32, r"^the model produced infinity in layer 0's keys at token 12$"),
    ],
)
def test_numbers_that_are_not_finite_once_stored(
    value: float, dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    keys = torch.zeros(2, 10, 8)
    keys[1, 7, 3], keys[0, 2, 1] = value, 1.0

    def write() -> None:
        with TraceWriter(tmp_path / "x", [LayerShape(0, 2, 3, 8, 1.0)], torch.arange(T), dtype) as writer:
            writer.write(0, "keys", 0, torch.zeros(2, 5, 8))
            writer.write(0, "keys", 5, keys)

    with pytest.raises(TraceError, match=message):
        write()
    with pytest.raises(TraceError, match=r"produced NaN .* load it in bfloat16 or float32 \(--dtype\)"):
        TraceWriter.write(one_layer(tmp_path / "x"), 0, "keys", 0, torch.full((2, 1, 8), torch.nan).half())
    assert list(tmp_path.iterdir()) == []


def test_a_file_behind_links_is_replaced_and_a_loop_of_links_refused(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    target.parent.mkdir()
    link.symlink_to(target)
    for data in (b"new", b"old"):
        write_atomic(link, data)
        assert (link.is_symlink(), target.read_bytes()) == (True, data)
    trace(layer(0)).save(link)
    assert link.is_symlink()
    assert_same(Trace.open(target).layer(0), layer(0))
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(TraceError, match="loop cannot be written: "):
        trace(layer(0)).save(loop)
    with pytest.raises(TraceError, match="loop cannot be read: "):
        Trace.open(loop)
    with pytest.raises(OSError, match="loop") as raised:
        write_atomic(loop, b"")
    assert raised.value.filename == str(loop)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
@pytest.mark.parametrize("reserved", [True, False])
def test_a_limit_of_file_sizes_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserved: bool) -> None:
    import resource

    if not reserved:  # as where the file system cannot: met on the way
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(TraceError, match=rf"^{tmp_path}/x cannot be written: File too large$"):
            trace(layer(0)).save(tmp_path / "x")
        with pytest.raises(OSError, match="File too large") as raised:
            write_atomic(tmp_path / "y", b" " * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.filename == str(tmp_path / "y")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the file system is asked through posix_fallocate")
def test_a_quota_is_not_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def used_up(*args: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", used_up)
    with pytest.raises(TraceError, match=r"x cannot be written: Disk quota exceeded$"):
        trace(layer(0)).save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_names_the_file_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(FileNotFoundError) as missing:
        write_atomic(tmp_path / "gone" / "x", b"new")
    assert missing.value.filename == str(tmp_path / "gone" / "x")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as raised:
        write_atomic(path, b"new")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))
    with pytest.raises(TraceError, match=r"x needs [\d,]+ bytes, .* has [\d,]+ free"):
        trace(layer(0)).save(path)
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], b"old")


def test_an_os_error_of_the_callers_own_stays_what_it_is(tmp_path: Path) -> None:
    def broken() -> None:
        with one_layer(tmp_path / "x"):
            raise BrokenPipeError(errno.EPIPE, "the caller's")

    with pytest.raises(BrokenPipeError):
        broken()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux alone says which pages are resident")
def test_a_layer_that_was_let_go_of_leaves_no_pages_behind(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    synthetic(8192, heads=2, group=4, size=64, clusters=8, queries=4096, sinks=0).save(path)

    def resident() -> int:
        """Bytes of the file's pages in this process."""
        total, ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if not line[0].isupper():  # the addresses of the next mapping, and its file
                ours = line.endswith(str(path))
            elif ours and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
        return total

    trace = Trace.open(path)
    layer = trace.layer(0)
    assert layer.query.isfinite().all()
    assert resident() > layer.query.nbytes
    del layer
    assert resident() < path.stat().st_size / 8


def test_half_a_character_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    trace = synthetic(80, size=16)
    path = tmp_path / "t.safetensors"
    for meta, pieces in (({"text": {"file": "caf\udce9.txt"}}, None), ({}, ["\ud800"] * 80)):
        with pytest.raises(TraceError, match="are whole Unicode characters"):
            Trace.build([trace.layer(0)], trace.positions, meta, pieces=pieces).save(path)
        assert not path.exists()
