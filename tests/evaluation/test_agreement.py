"""Agreement with full attention: what is measured, how it is continued, by layer sets, and how it is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from typer.testing import CliRunner, Result

from sparseattn import Exact, Quest, Selector, Window
from sparseattn.cli.app import app
from sparseattn.cli.eval_methods import layer_set
from sparseattn.core.budget import Budget
from sparseattn.evaluation.tasks.agreement import agreement
from sparseattn.evaluation.tasks.compared import FORCED, FULL
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.registry import example
from sparseattn.evaluation.tasks.run import Method, measure
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.models.load import load_model
from sparseattn.reporting import agreement_tables as report

BYTES = Tokens(None)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *(str(argument) for argument in arguments)])


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of bytes with three layers, whose attention matters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    bytes_ = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **bytes_, num_key_value_heads=2, max_position_embeddings=1024))
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 3
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(example("passkey", 600, seed=seed).context for seed in range(4)))
    return path


def test_what_is_measured_is_by_its_definition() -> None:
    logits, dense = torch.randn(2, 5, 11)
    dense[3] = logits[3]
    found = agreement(logits, dense, [3, 1, 4, 1, 5])
    log, full = logits.double().log_softmax(-1), dense.double().log_softmax(-1)
    assert found["kl"] == pytest.approx(float(kl_div(log, full, log_target=True, reduction="sum")) / 5)
    assert found["same_top"] == float((logits.argmax(-1) == dense.argmax(-1)).double().mean())
    assert found["same_top"] > 0
    places = torch.arange(5), torch.tensor([3, 1, 4, 1, 5])
    assert found["nll"] == pytest.approx(-float(log[places].mean()))
    assert found["nll_difference"] == pytest.approx(float((full - log)[places].mean()))
    assert found["scored_tokens"] == 5
    assert agreement(dense, dense, [0] * 5)["kl"] == agreement(dense, dense, [0] * 5)["nll_difference"] == 0
    assert agreement(dense, dense, [0] * 5)["same_top"] == 1


class Fixed:
    """A decoder whose sessions give 3/4 to the next byte in the alphabet; it writes down what it is asked to do."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.fed: list[tuple[str, str]] = []

    def read(self, tokens: Sequence[int]) -> str:
        self.reads.append(BYTES.text(tokens))
        return self.reads[-1]

    def index(
        self,
        prefill: Any,
        tail: Sequence[int],
        selector: Selector | None,
        layers: Sequence[int] | None = None,
        bits: int | None = None,
    ) -> str:
        return FULL if selector is None else selector.label()

    def start(self, indexed: Any, budget: Budget) -> Any:
        decoder = self

        class Session:
            def feed(self, tokens: Sequence[int]) -> Tensor:
                decoder.fed.append((indexed, BYTES.text(tokens)))
                logits = torch.zeros(len(tokens), 256)
                for row, token in zip(logits, tokens, strict=True):
                    row[token + 1] = math.log(255 * 3)
                return logits

            def facts(self) -> dict[str, Any]:
                return {"rows": 1}

        return Session()


def test_it_is_of_the_last_tokens_each_behind_the_one_before() -> None:
    decoder = Fixed()
    prompt = Prompt.passage({"task": "agreement", "length": 6}, list(b"abcdef"), 2)
    (record,) = measure(prompt, [Method()], ["question", "prefill"], decoder, BYTES)
    assert decoder.reads == ["abc"]
    assert decoder.fed == [(FULL, "de")]
    assert record["protocol"] == FORCED
    assert record["scored_tokens"] == 2
    assert record["nll"] == pytest.approx(-math.log(0.75))
    assert report.perplexity([record]) == pytest.approx(1 / 0.75)


def test_full_attention_runs_once_a_prompt_and_again_where_records_are_continued() -> None:
    prompt = Prompt.passage({"task": "agreement", "length": 6}, list(b"abcdef"), 2)
    methods = [Method(), Method(Quest(), 64, "64"), Method(Quest(), 256, "256"), Method(Window())]
    decoder, keys = Fixed(), prompt.keys([], methods)
    records = list(measure(prompt, methods, [], decoder, BYTES))
    assert [label for label, _ in decoder.fed] == [FULL, "quest", "quest", "window"]
    assert [(one["kl"], one["same_top"]) for one in records] == [(0.0, 1.0)] * 4
    decoder = Fixed()
    assert len(list(measure(prompt, methods, [], decoder, BYTES, known=keys[:2]))) == 2
    assert [label for label, _ in decoder.fed] == [FULL, "quest", "window"]
    decoder = Fixed()
    assert not list(measure(prompt, methods, [], decoder, BYTES, known=keys))
    assert decoder.reads == []


@pytest.mark.parametrize(
    ("text", "layers", "written"),
    [
        ("all", None, None),
        ("0-2", (0, 1, 2), "0-2"),
        ("9,0-2,1,4", (0, 1, 2, 4, 9), "0-2,4,9"),
        ("7", (7,), "7"),
        ("3,4", (3, 4), "3-4"),
    ],
)
def test_sets_of_layers_have_one_name(text: str, layers: tuple[int, ...] | None, written: str | None) -> None:
    assert layer_set(text) == layers
    assert Method(Quest(), 64, "64", layers).where == written
    if written:
        assert layer_set(written) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "2-1", "1,,2", "1--2", "٣-", "0 1"])
def test_what_names_no_layers_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="--sparse-layers takes layers and ranges"):
        layer_set(text)


def test_a_model_agrees_with_itself_and_less_the_more_layers_are_sparse(folder: Path) -> None:
    model, _ = load_model(folder)
    decoder = ModelDecoder(model, sink=2, window=8, chunk=100)
    ids = list(example("kv", 400, seed=1).context.encode())[:300]
    prompt = Prompt.passage({"task": "agreement", "length": 300, "text": "t", "kind": "k"}, ids, 16)
    methods = [
        Method(),
        Method(Exact(), None, "all"),
        *(Method(Window(), None, None, layers) for layers in (None, (1,), (1, 2))),
        Method(Quest(), 64, "64"),
    ]
    full, exact, window, one, two, quest = measure(prompt, methods, [], decoder, BYTES)
    assert (full["kl"], full["same_top"], full["nll_difference"]) == (0.0, 1.0, 0.0)
    assert full["bytes_share"] == 1.0
    assert exact["kl"] < 1e-6
    assert exact["same_top"] == 1.0
    assert exact["bytes_share"] > 1.0  # every key is read twice
    assert 1e-4 < one["kl"] != two["kl"]
    assert len({found["nll"] for found in (window, one, two)}) == 3
    assert [found["sparse_calls"] for found in (window, one, two)] == [16 * 3, 16, 16 * 2]
    assert [found["layers"] for found in (window, one, two)] == [None, "1", "1-2"]
    assert window["bytes_share"] == pytest.approx(10 / window["context"], rel=0.01)
    assert 64 / 300 < quest["bytes_share"] < (64 + 26 + 2 * 20) / 290  # and the pages' bounds
    assert decoder.sparse == (0, 1, 2)
    # a layer that is sparse on its own reads what it reads beside others
    dense_before = ModelDecoder(model, sink=2, window=8, chunk=100, dense_layers=1)
    (again,) = measure(prompt, [Method(Window())], [], dense_before, BYTES)
    assert again["kl"] == pytest.approx(two["kl"])


def test_a_run_by_texts_budgets_and_layers_and_its_continuation(folder: Path, book: Path, tmp_path: Path) -> None:
    options = ["--model", folder, "--task", "agreement", "--text", book, "--text", "apache-2.0", "--lengths", "200,300"]
    options += ["--samples", "2", "--last", "8", "--sink", "2", "--window", "8", "--sparse-layers", "0-1"]
    options += ["--selector", "quest", "--selector", "window", "--budget", "32,64", "--out", tmp_path]
    done = run(*options)
    assert done.exit_code == 0, done.output
    records = lines(tmp_path)
    assert len(records) == 2 * 2 * 2 * 4
    assert {(one["text"], one["kind"]) for one in records} == {("book.txt", "a file"), ("apache-2.0", "licence")}
    assert {one["layers"] for one in records if one["method"] != FULL} == {"0-1"}
    assert {one["layers"] for one in records if one["method"] == FULL} == {None}
    assert not {"logits", "dense"} & set(records[0])
    said = " ".join(done.output.split())
    assert "apache-2.0 (licence), 300 tokens, 2 windows, the last 8 tokens of each" in said
    assert said.count("agreement with full attention: ") == 4
    assert "quest, layers 0-1" in said
    assert "agreement at 300 tokens, sparse in layers 0-1 (book.txt, apache-2.0; 4 windows): " in said
    assert (tmp_path / "agreement.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "accuracy.png").exists()

    kept = (tmp_path / "eval.jsonl").read_bytes()
    more = run(*options, "--sparse-layers", "all", "--json", "--no-figures")
    assert more.exit_code == 0, more.output
    assert (tmp_path / "eval.jsonl").read_bytes().startswith(kept)
    assert len(lines(tmp_path)) == 2 * 2 * 2 * 7
    shown = [json.loads(line) for line in more.stdout.splitlines()]
    assert len(shown) == 2 * 2 * 2 * 7
    # the two windows of a text begin and end with it
    assert len({one["prompt"] for one in shown if one["text"] == "book.txt" and one["length"] == 200}) == 2


def test_records_of_perplexity_alone_may_stay_and_records_that_lack_something_may_not(
    folder: Path, book: Path, tmp_path: Path
) -> None:
    options = ["--model", folder, "--task", "agreement", "--text", book, "--lengths", "100", "--last", "4"]
    options += ["--samples", "1", "--selector", "window", "--no-figures", "--out", tmp_path]
    assert run(*options).exit_code == 0
    path = tmp_path / "eval.jsonl"
    first, second = path.read_text().splitlines()
    old = {**json.loads(first), "task": "ppl", "file": "book.txt"}
    for name in ("layers", "kl", "same_top", "nll_difference", "text", "kind", "bytes_share"):
        del old[name]
    path.write_text("\n".join((json.dumps(old), first, second)) + "\n")
    done = run(*options)
    assert done.exit_code == 0, done.output
    assert len(lines(tmp_path)) == 3
    for name, value in (("kl", -1), ("kl", None), ("same_top", 2), ("nll_difference", "1"), ("text", 3), ("length", 0)):
        path.write_text(f"{first}\n{json.dumps({**json.loads(second), name: value})}\n")
        done = run(*options)
        assert done.exit_code == 2, done.output
        assert f"line 2 is a line that is no record of this command: {name} is " in " ".join(done.output.split())


def made(method: str, budget: str | None, rows: float, *kl: float, **facts: Any) -> list[dict[str, Any]]:
    """Records by hand, a window each."""
    settings = {"model": "m", "sink": 4, "window": 64, "dense_layers": 0}
    one = {"task": "agreement", "protocol": FORCED, "length": 4096, "settings": settings, "layers": None}
    one |= {"text": "t", "kind": "novel", "scored_tokens": 64, "same_top": 0.9, "nll_difference": 0.01}
    one |= {"method": method, "budget": budget, "rows": rows, "nll": 1.0, "bytes_share": rows / 4096}
    return [{**one, "kl": each, "prompt": f"p{i}", **facts} for i, each in enumerate(kl)]


def test_the_closing_line_says_what_stays_near_for_the_fewest_rows_and_bytes() -> None:
    records = [
        *made(FULL, None, 4096, 0.0, 0.0),
        *made("exact", "64", 132, 0.02, 0.012, bytes_share=0.53),
        *made("quest", "256", 324, 0.1, 0.3),
        *made("quest", "1024", 1092, 0.01, 0.02),
        *made("window", None, 68, 0.4, 0.4, same_top=0.5),
    ]
    assert report.verdicts(records) == [
        "agreement at 4,096 tokens (t; 2 windows): fewest tokens read within 0.02 nats per token of full attention: "
        "exact at budget 64, 132 tokens, 0.016 nats, top-1 agreement 90%. Fewest bytes: quest at budget 1024, 27% of "
        "the cache of a sparse layer. Farthest: window, 68 tokens, 0.400 nats, top-1 agreement 50%."
    ]
    other = [{**one, "text": "u", "prompt": "q", "kl": 2 * one["kl"]} for one in records]
    (line,) = report.verdicts([*records, *other])
    assert line.startswith(
        "agreement at 4,096 tokens (t, u; 3 windows): no method stays within 0.02 nats per token of full "
        "attention on every text. Closest: quest at budget 1024, 1,092 tokens, 0.030 nats on the worst text, "
    )
    (line,) = report.verdicts([*records, *(one for one in other if one["method"] != "exact")])
    assert "exact" not in line, "it was measured on one text of two"
    assert line.endswith(" 1 more of the tables' rows are not of all windows.")
    (line,) = report.verdicts([*made("quest", "64", 132, 0.01), *made("exact", "64", 132, 0.01, text="u")])
    assert line.endswith("no method was measured on every window.")
    unknown = [{**one, "bytes_share": None} for one in records]
    assert "bytes" not in report.verdicts(unknown)[0]
    sets = [one for one in records if one["method"] != "quest"] + made("quest", "64", 132, 0.01, layers="0-9")
    assert [line.split(" (")[0] for line in report.verdicts(sets)] == [
        "agreement at 4,096 tokens",
        "agreement at 4,096 tokens, sparse in layers 0-9",
    ]


def test_the_table_shows_intervals_over_windows_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    records = [*made(FULL, None, 4096, 0.0, 0.0, 0.0), *made("quest", "256", 324, 0.01, 0.02, 0.03)]
    Console(width=150).print(*report.tables(records))
    shown = capsys.readouterr().out
    assert "0.0200 (0.0000 to 0.0448)" in shown  # 4.303 * 0.01 / sqrt(3), and not below nothing
    assert "t (novel), 4,096 tokens, 3 windows" in shown
    assert f"{math.e:.3f}" in shown
    Console(width=150).print(*report.tables(made("quest", "256", 324, 0.01, bytes_share=None)))
    shown = capsys.readouterr().out
    assert "1 window, so no interval" in " ".join(shown.split())
    assert " to " not in shown.split("KL")[-1]
    assert ["quest", "256", "324", "?", "0.0100", "90.0", "0.0100", "2.718"] in [
        line.split() for line in shown.splitlines()
    ]


def test_a_perplexity_beyond_all_numbers_is_infinite(tmp_path: Path) -> None:
    from sparseattn.reporting import plots

    records = [*made(FULL, None, 9, 0.0), *made("window", None, 9, 1e6, nll=1e6)]
    assert report.perplexity(records[1:]) == math.inf
    assert "1000000.000 nats" in report.verdicts(records)[0]
    plots.agreement(records, tmp_path / "agreement.png")
    plots.agreement(records[:1], tmp_path / "nothing.png")


def test_layers_that_no_model_has_are_refused_before_they_are_counted() -> None:
    with pytest.raises(ValueError, match=r"--sparse-layers must be numbers up to 9999, got '0-9999999999'"):
        layer_set("0-9999999999")
