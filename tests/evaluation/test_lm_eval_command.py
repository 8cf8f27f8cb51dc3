"""`sparseattn lm-eval`: lm-eval's own command over tasks in local files, here and through a server."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'sparseattn[lm-eval]'")
pytest.importorskip("transformers")

from lm_eval import simple_evaluate
from lm_eval import tasks as lm_eval_tasks

from sparseattn.evaluation.harness import launch
from tests.command import run
from tests.evaluation.lm_eval_tiny import saved_model, saved_tasks

SMALL = "--selector quest:page=4 --budget 8 --sink 2 --window 8 --seal 16"


@pytest.fixture(autouse=True)
def own_tasks_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """lm-eval reads its 13,000 files of tasks in seconds; here it knows those of a test alone. Its logs go nowhere."""
    monkeypatch.setattr(launch, "setup_logging", lambda: None)
    made = functools.partial(lm_eval_tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", made)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "tiny")


def results(folder: Path) -> dict[str, Any]:
    (file,) = folder.rglob("results_*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def scores(found: dict[str, Any]) -> dict[str, Any]:
    return {task: {name: x for name, x in of.items() if name != "alias"} for task, of in found["results"].items()}


def hflm(model: Path, tasks: Path) -> dict[str, Any]:
    """What lm-eval's own model scores, and its answers as if they were right."""
    manager = lm_eval_tasks.TaskManager(include_path=str(tasks))
    given: dict[str, Any] = {"pretrained": str(model)}
    found = simple_evaluate(
        "hf", given, ["made_choice", "made_answer"], device="cpu", task_manager=manager, bootstrap_iters=0
    )
    return dict(found)


def test_at_budget_all_the_scores_are_hflms_to_the_digit_and_the_run_says_what_ran(model: Path, tmp_path: Path) -> None:
    first = hflm(model, saved_tasks(tmp_path / "asked"))
    said = [sample["filtered_resps"][0] for sample in first["samples"]["made_answer"]]
    tasks = saved_tasks(tmp_path / "tasks", said)
    expected = hflm(model, tasks)
    assert expected["results"]["made_answer"]["exact_match,none"] == 1
    line = "lm-eval --tasks made_choice,made_answer --batch_size 2 --device cpu --selector quest:page=4 --budget all"
    done = run(line, "--include_path", tasks, "--model_args", f"pretrained={model}", "--output_path", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = results(tmp_path / "out")
    assert {t: {k: v for k, v in of.items() if "stderr" not in k} for t, of in scores(found).items()} == {
        t: {k: v for k, v in of.items() if "stderr" not in k} for t, of in scores(expected).items()
    }
    ran = found["config"]["sparseattn"]
    assert ran["budget"] == "all"
    assert ran["total"]["rows_read"] == ran["total"]["rows_held"] > 0
    assert set(ran["tasks"]) == {"made_choice", "made_answer"}
    assert "behind the context" in done.output

    fewer = run(
        f"lm-eval run --tasks made_answer --limit 2 {SMALL}",
        *("--include_path", tasks, "--model_args", f"pretrained={model}", "--output_path", tmp_path / "fewer"),
    )
    assert fewer.exit_code == 0, fewer.output
    assert results(tmp_path / "fewer")["results"]["made_answer"]["exact_match,none"] < 1
    assert results(tmp_path / "fewer")["config"]["sparseattn"]["total"]["rows_read"] > 0


def test_a_tail_of_no_task_is_refused_before_the_model_is_loaded(model: Path, tmp_path: Path) -> None:
    tasks = saved_tasks(tmp_path / "tasks")
    line = f"lm-eval --tasks made_answer --tail made_*=4,nothere_*=5 {SMALL}"
    done = run(line, "--include_path", tasks, "--model_args", f"pretrained={model}", "--output_path", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert "--tail names nothere_*, and no task here is called so: there are made_answer" in " ".join(
        done.output.split()
    )
    line = line.replace(",nothere_*=5", "")
    done = run(line, "--include_path", tasks, "--model_args", f"pretrained={model}", "--output_path", tmp_path / "out")
    assert done.exit_code == 0, done.output


def test_a_run_in_which_nothing_was_sparse_writes_no_score(model: Path, tmp_path: Path) -> None:
    tasks = saved_tasks(tmp_path / "tasks")
    done = run(
        f"lm-eval --tasks made_answer --tail 0 --gen_kwargs max_gen_toks=1 {SMALL}",
        *("--include_path", tasks, "--model_args", f"pretrained={model}", "--output_path", tmp_path / "out"),
    )
    assert done.exit_code == 2
    assert "sparseattn: no step of made_answer was sparse, so that no score is written" in done.output
    assert not (tmp_path / "out").exists()


def config(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps(fields))  # which is YAML too
    return path


def test_a_config_files_responses_are_of_its_settings_and_the_command_line_wins(model: Path, tmp_path: Path) -> None:
    tasks, kept = saved_tasks(tmp_path / "tasks"), tmp_path / "kept"
    given = {"tasks": ["made_answer"], "include_path": str(tasks), "model_args": {"pretrained": str(model)}}
    path = config(tmp_path / "config.yaml", **given, use_cache=str(kept / "file"), limit=2)
    line = f"lm-eval {SMALL} --config {path}"
    for number, (more, limit) in enumerate([("", 2), ("--sink 3", 2), (f"--use_cache {kept}/line --limit 1", 1)]):
        done = run(f"{line} {more} --output_path {tmp_path / str(number)}")
        assert done.exit_code == 0, done.output
        found = results(tmp_path / str(number))
        assert found["n-samples"]["made_answer"]["effective"] == limit
        assert found["config"]["sparseattn"]["tasks"]["made_answer"]["of_kept_responses"] == 0
    assert sorted(re.sub("-[0-9a-f]{12}_", "-DIGEST_", file.name) for file in kept.glob("*.db")) == [
        *["file-DIGEST_rank0.db"] * 2,
        "line-DIGEST_rank0.db",
    ]
    server = config(tmp_path / "server.yaml", use_cache="here", model="local-completions", tasks="made_answer")
    done = run(f"lm-eval --config {server} --model_args base_url=http://127.0.0.1:1/v1/completions")
    assert done.exit_code == 2
    assert "--use_cache keeps responses by their prompt, and another server" in done.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "YAML root must be a mapping"),
        ("a: [", "while parsing a flow node"),
        ("task: made", "lm-eval has no field 'task' (did you mean 'tasks'?): there are config, model, "),
        ("model_args: [a, b]", "model_args must be a mapping, such as {name: value}, got ['a', 'b']"),
        ("metadata: [1]", "metadata must be a mapping, such as {name: value}, got [1]"),
        ("use_cache: ''", "use_cache must be the path of a file, got ''"),
        ("tasks: 1", "tasks must be names, such as [hellaswag, arc_easy], got 1"),
    ],
)
def test_a_wrong_config_file_is_a_sentence_that_names_it(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    done = run(f"lm-eval --config {tmp_path / 'config.yaml'} --model_args pretrained=x")
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"sparseattn: --config {tmp_path / 'config.yaml'}: ")
    assert says in done.stderr


class Fake(BaseHTTPRequestHandler):
    """A server of completions that counts ten sparse steps an answer in layer 1, where it is sparse."""

    sparse = True
    answered = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        lines = ["# TYPE sparseattn_sparse_steps_total counter"]
        if self.sparse and Fake.answered:
            lines += [
                f'sparseattn_{name}_total{{layer="1"}} {float(each * Fake.answered)}'
                for name, each in (("sparse_steps", 10), ("rows_read", 500), ("rows_held", 2000))
            ]
        self.wfile.write("\n".join([*lines, ""]).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Fake.answered += 1
        prompts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
        self.send_response(200)
        self.end_headers()
        choices = [{"index": number, "text": "Whom?"} for number in range(len(prompts))]
        self.wfile.write(json.dumps({"choices": choices}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Fake, "answered", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/completions"
        server.shutdown()
        thread.join()


def ask_server(url: str, tasks: Path, out: Path, task: str, *more: object) -> Any:
    given = f"base_url={url},model=m,tokenizer_backend=none,tokenized_requests=False,num_concurrent=1"
    line = f"lm-eval --model local-completions --tasks {task}"
    return run(line, "--include_path", tasks, "--model_args", given, "--output_path", out, *more)


def test_a_servers_counters_are_read_around_a_task(served: str, tmp_path: Path) -> None:
    tasks, out = saved_tasks(tmp_path / "tasks"), tmp_path / "out"
    Fake.answered = 7  # before we came
    done = ask_server(served, tasks, out, "made_answer")
    assert done.exit_code == 0, done.output
    found = results(out)
    assert found["results"]["made_answer"]["exact_match,none"] == pytest.approx(1 / 3)
    ran = found["config"]["sparseattn"]["tasks"]["made_answer"]
    assert (ran["sparse_steps"], ran["rows_read"], ran["rows_held"]) == (30, 1500, 6000)


@pytest.mark.parametrize(
    ("task", "more", "says"),
    [
        ("made_answer,made_choice", (), "made_choice: such tasks score log-probabilities of prompts, which a server"),
        ("made_answer", ("--budget", "64"), "a server decodes as it was started: give --budget to `sparseattn serve`"),
        ("made_answer", ("--use_cache", "here"), "--use_cache keeps responses by their prompt"),
    ],
)
def test_what_a_server_cannot_do_is_said_before_it_is_asked(
    served: str, tmp_path: Path, task: str, more: tuple[str, ...], says: str
) -> None:
    done = ask_server(served, saved_tasks(tmp_path / "tasks"), tmp_path / "out", task, *more)
    assert done.exit_code == 2
    assert says in done.output
    assert Fake.answered == 0


def test_a_server_that_decodes_densely_has_no_score(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "sparse", False)
    done = ask_server(served, saved_tasks(tmp_path / "tasks"), tmp_path / "out", "made_answer")
    assert done.exit_code == 2
    assert "no step of made_answer was sparse" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model hf --model_args pretrained=x", "--model is sparseattn, which decodes sparsely here, or local-"),
        ("--tasks made", "--model_args needs pretrained=MODEL"),
        ("--model_args pretrained=x,budget=4", "budget are options of this command, and not of --model_args"),
        ("--model_args pretrained=x --tail many", '--tail is tokens at the end of a prompt ("64"), or by task'),
        ("--model_args pretrained=x --budget -1", "a budget is at least 1 row, got -1"),
        (
            "--model local-completions --model_args base_url=http://h",
            "lm-eval: Tasks not found: made",
        ),
        ("--model_args pretrained=/no/such", "no such model folder: /no/such"),
        ("--model local-completions --model_args model=m", "--model_args needs base_url=URL"),
        ("--model local-completions --model_args base_url=x", "a server's address is a URL such as"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(words: str, says: str) -> None:
    done = run(f"lm-eval --tasks made {words}" if "--tasks" not in words else f"lm-eval {words}")
    assert done.exit_code == 2
    assert f"sparseattn: {says}" in done.output
