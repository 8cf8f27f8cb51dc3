"""`sparseattn recommend`: what an error is worth, the knapsack, the search, windows that share nothing, and the run."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from sparseattn.cli.app import app
from sparseattn.cli.recommend import _page
from sparseattn.cli.recommend_search import _families
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.error_sensitivity import _Watched, observe
from sparseattn.models.prefill import Prefill
from sparseattn.recommend.bounds import Bound, parse_error
from sparseattn.recommend.candidates import candidates
from sparseattn.recommend.choosing import STEPS, Option, choose, efficient
from sparseattn.recommend.frontier import measured
from sparseattn.recommend.objective import MeasuredBytes, PlannedLayer, Predicted
from sparseattn.recommend.records import TrialRecords
from sparseattn.recommend.search import LayerOption, Proposal, propose, search
from sparseattn.recommend.settling import settle
from sparseattn.recommend.single import between, singles
from sparseattn.recommend.windows import shared, windows
from sparseattn.roles.plan import Plan
from sparseattn.roles.role import Role
from sparseattn.serving.vllm.settings import Settings
from tests.models.tiny import small

IDS = torch.randint(1, 256, (1, 96), generator=torch.Generator().manual_seed(5))
TEXT, LAST = IDS[:, :80], IDS[0, 80:].tolist()


@pytest.fixture(scope="module")
def prefill() -> Prefill:
    return Prefill(small("llama", num_attention_heads=4, num_key_value_heads=2), TEXT)


# -- what an error of a layer is worth ---------------------------------------------------------------------------------


def logits(prefill: Prefill, layer: int | None = None, error: torch.Tensor | None = None) -> torch.Tensor:
    """`[n,V]` log-probabilities in float64 of full attention, with an `error` `[1,HG,n,D]` in the output of a layer."""
    cache = prefill.cache("window", None, sink=0, window=0)
    for index, one in cache.sparse_layers.items():
        watched = cache.layers[index] = _Watched(one, cache.prepared.layers[index])
        if index == layer:
            before = watched.attend
            watched.attend = lambda call, run: before(call, run) + error.transpose(1, 2)  # noqa: B023
    cache.sparse_from = 10**9
    with torch.no_grad():
        out = cache.model(input_ids=torch.tensor([LAST]), use_cache=True, **cache_argument(cache)).logits[0]
    return out.double().log_softmax(-1)


def test_gradients_foretell_the_divergence_of_a_small_error(prefill: Prefill) -> None:
    seen = observe(prefill, LAST, draws=300)
    full = logits(prefill)
    for layer, one in seen.items():
        draw = torch.Generator().manual_seed(layer)
        error = 0.002 * one.out.norm() / one.out.numel() ** 0.5 * torch.randn(one.out.shape, generator=draw)
        other = logits(prefill, layer, error.flatten(1, 2))
        right = float((full.exp() * (full - other)).sum(-1).mean())
        moved = (one.gradients * error[0]).sum((1, 2, 3, 4))  # [S], all tokens together
        assert 0.5 * float(moved.square().mean()) / len(LAST) == pytest.approx(right, rel=0.25)


def test_what_was_observed_is_full_attention_and_leaves_the_prefill(prefill: Prefill) -> None:
    rows = prefill.rows(0).lengths.tolist()
    first, second = observe(prefill, LAST, draws=1), observe(prefill, LAST, draws=1)
    assert prefill.rows(0).lengths.tolist() == rows
    for layer, one in first.items():
        torch.testing.assert_close(one.gradients, second[layer].gradients)
        (point,) = measured(prefill, one, layer, [Role("exact", "all")], sink=2, window=8, depth=3)
        assert point.kl < 1e-8
        assert max(point.error_heads) < 1e-4
    for wrong in (([], 1), (LAST, 0)):
        with pytest.raises(ValueError, match="1 token or more by 1 draw or more"):
            observe(prefill, *wrong)


def test_more_rows_lose_less_and_read_more(prefill: Prefill) -> None:
    seen = observe(prefill, LAST, draws=8)
    roles = [Role("exact:group=softmax", rows) for rows in (2, 8, 32)]
    points = measured(prefill, seen[1], 1, roles, sink=2, window=8, depth=3)
    assert [point.role for point in points] == roles
    for head in range(2):
        lost = [point.error_heads[head] for point in points]
        read = [point.bytes_heads[head] for point in points]
        assert lost == sorted(lost, reverse=True)
        assert read == sorted(read)
    (recent,) = measured(prefill, seen[1], 1, [Role("window", 32)], sink=2, window=8, depth=3)
    assert 42 / 88 < recent.bytes_heads[0] < (42 + 16) / 88, "a wider window, and what waits for a page"


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_the_knapsack_is_as_good_as_trying_everything() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        units = [[Option(*torch.rand(2, generator=draw).tolist()) for _ in range(4)] for _ in range(4)]
        bound = 1.2
        taken = choose(units, bound)
        every = [[units[u][i] for u, i in enumerate(which)] for which in itertools.product(range(4), repeat=4)]
        fits = [sum(o.cost for o in one) for one in every if sum(o.loss for o in one) <= bound]
        if taken is None:
            assert not fits
            continue
        picked = [units[u][i] for u, i in enumerate(taken)]
        assert sum(o.loss for o in picked) <= bound * (1 + len(units) / STEPS)
        assert sum(o.cost for o in picked) <= min(fits, default=math.inf) + 1e-9
    assert choose([[Option(1, 2)], [Option(1, 2)]], 1) is None
    with pytest.raises(ValueError, match="one option or more for each unit, and a bound above 0"):
        choose([[]], 1)


def test_what_is_beaten_at_its_own_cost_is_no_option() -> None:
    options = [Option(3, 1), Option(1, 5), Option(2, 6), Option(2, 4), Option(4, 1)]
    assert efficient(options) == [1, 3, 0]


LAYERS = [PlannedLayer(i, 2, 2, 16, torch.bfloat16) for i in range(3)]


def choices(weights: tuple[float, ...] = (1.0, 0.1, 0.001)) -> dict[int, list[LayerOption]]:
    """Layers that lose by their weight, and of each the first head alone."""
    found = {}
    for layer, weight in zip(LAYERS, weights, strict=True):
        some = [LayerOption(Role("dense"), 0.0, [0.0, 0.0], [1.0, 1.0])]
        for rows, loss in ((64, 0.1), (16, 0.4), (4, 1.6)):
            some.append(LayerOption(Role("exact", rows), weight * loss, [weight * loss, 0.0], [rows / 256] * 2))
        found[layer.index] = some
    return found


def test_rows_go_where_they_matter_and_heads_apart_where_that_costs_less() -> None:
    objective = MeasuredBytes(256, 2)
    rows = propose(LAYERS, [choices()], 0.15, False, objective)
    assert rows.layers == {0: Role("exact", 64), 1: Role("exact", 16), 2: Role("exact", 4)}
    assert rows.kl == pytest.approx(0.1 + 0.04 + 0.0016)
    heads = propose(LAYERS, [choices()], 0.15, True, objective)
    assert heads.layers[0] == [Role("exact", 64), Role("exact", 4)]
    assert heads.cost < rows.cost
    none = propose(LAYERS, [choices()], 1e-6, False, objective)
    assert none.all_dense
    assert none.cost == 6.0
    worse = {layer: some[:1] for layer, some in choices().items()}
    assert propose(LAYERS, [worse, choices()], 0.15, False, objective).layers == rows.layers


def test_seconds_are_of_launches_which_heads_of_two_roles_do_not_share() -> None:
    from sparseattn.cost_model.machine import Machine

    objective = Predicted(131072, 8, 4, 64, Machine.load("h100"))
    layer, dense, quest = PlannedLayer(0, 8, 4, 128, torch.bfloat16), Role("dense"), Role("quest", 2048)
    costs = {role: objective.heads(layer, role, []) for role in (dense, quest)}
    assert objective.unit == "seconds"
    assert sum(costs[quest]) < sum(costs[dense])
    assert objective.layer(layer, quest, costs) == pytest.approx(sum(costs[quest]))
    mixed = objective.layer(layer, [dense, quest] * 4, costs)
    assert mixed > 0.5 * (sum(costs[quest]) + sum(costs[dense]))
    counted = Predicted(131072, 8, 4, 64, None)
    assert counted.unit == "bytes"
    assert sum(counted.heads(layer, dense, [])) == 8 * 8 * 131072 * 2 * 128 * 2


@pytest.mark.parametrize(("factor", "power"), [(1.0, 1.0), (3.7, 1.0), (0.2, 1.0), (1.5, 2.0)])
def test_the_search_finds_the_limit_at_which_the_whole_keeps_the_bound(factor: float, power: float) -> None:
    """The whole loses another multiple of what its layers say, and a share of tokens grows as its root."""
    weights = tuple(2.0**-i for i in range(3))
    steps = {layer: [*some] for layer, some in choices(weights).items()}
    for layer, some in steps.items():  # many budgets, so that any loss can be had
        for rows in range(5, 64):
            loss = weights[layer] * 0.4 * 16 / rows
            some.append(LayerOption(Role("exact", rows), loss, [loss, 0.0], [rows / 256] * 2))
    found = search(
        lambda limit: propose(LAYERS, [steps], limit, False, MeasuredBytes(256, 2)),
        lambda one: (factor * one.kl) ** (1 / power),
        bound=0.3,
        power=power,
    )
    assert found is not None
    assert 0.8 * 0.3 <= found[1] <= 0.3


def cheapest(bound: float, factor: float) -> float:
    """Cost of the best configuration of `choices()` that loses `bound` at most, by trying all of them."""
    every = itertools.product(*(choices()[layer.index] for layer in LAYERS))
    return min(sum(sum(one.cost_heads) for one in some) for some in every if factor * sum(x.kl for x in some) <= bound)


@pytest.mark.parametrize(("bound", "factor"), [(0.2, 1.5), (0.3, 1.2), (0.5, 1.2), (1.0, 2.0), (0.1, 3.0), (0.3, 0.3)])
def test_where_options_are_few_the_search_still_finds_the_best(bound: float, factor: float) -> None:
    tried = []

    def loss(one: Proposal) -> float:
        tried.append(one.roles.source())
        return factor * one.kl

    found = search(lambda limit: propose(LAYERS, [choices()], limit, False, MeasuredBytes(256, 2)), loss, bound)
    assert found is not None
    assert found[0].cost == pytest.approx(cheapest(bound, factor))
    assert len(tried) == len(set(tried)), "nothing is measured twice"


@pytest.mark.parametrize(("bound", "factor"), [(0.003, 0.3), (0.1, 0.3), (0.02, 0.5)])
def test_a_share_of_tokens_is_searched_for_as_well(bound: float, factor: float) -> None:
    found = search(
        lambda limit: propose(LAYERS, [choices()], limit, False, MeasuredBytes(256, 2)),
        lambda one: factor * one.kl**0.5,
        bound,
        2.0,
    )
    assert found is not None
    assert found[0].cost == pytest.approx(cheapest((bound / factor) ** 2, 1.0))


@pytest.mark.parametrize(
    ("bound", "searched", "verified"),
    [(0.15, 0.6, 1.2), (0.3, 0.5, 1.5), (0.3, 1.0, 0.9), (0.3, 0.0, 1.5), (0.3, -0.1, 1.5)],
)
def test_what_fails_where_it_was_held_out_gives_way_to_what_keeps_the_bound(
    bound: float, searched: float, verified: float
) -> None:
    """Losses on the windows to choose by may be far below the target, and those of the text's own likelihood below 0:
    the same configuration must not come again."""
    seen: list[str] = []

    def verify(one: Proposal, n: int) -> float:
        seen.append(one.roles.source())
        assert n == len(seen)
        return verified * one.kl

    full = sum(sum(choices()[layer.index][0].cost_heads) for layer in LAYERS)
    settled = settle(
        lambda limit: propose(LAYERS, [choices()], limit, False, MeasuredBytes(256, 2)),
        lambda one: searched * one.kl,
        verify,
        bound,
        1.0,
        full,
    )
    assert settled.proposal is not None
    assert len(seen) == len(set(seen)) == len(settled.rounds)
    assert settled.rounds[-1]["verified"] <= bound < min([one["verified"] for one in settled.rounds[:-1]] + [1e9])
    if searched > 0:
        assert settled.proposal.cost <= cheapest(bound, max(searched, verified)) * 1.01


def test_one_method_for_all_layers_is_read_off_between_its_budgets() -> None:
    assert between([(1.0, 100.0), (100.0, 1.0)], 10.0) == pytest.approx(10)
    assert between([(1.0, 100.0), (100.0, 1.0)], 0.5) is None
    assert between([(1.0, 100.0), (100.0, 1.0)], 200.0) == 1, "its smallest budget loses less than that"
    found = singles(LAYERS, choices((1.0, 1.0, 1.0)), 1.2)  # three layers at 16 rows
    assert found == {"exact": pytest.approx(3 * 2 * 16 / 256)}
    assert singles(LAYERS, choices(), 100.0) == {"exact": pytest.approx(3 * 2 * 4 / 256)}
    assert singles(LAYERS, choices(), 1e-9) == {"exact": None}


def test_a_search_that_finds_nothing_says_so() -> None:
    assert (
        search(lambda limit: propose(LAYERS, [choices()], limit, False, MeasuredBytes(256, 2)), lambda _: 1.0, 0.1)
        is None
    )


# -- windows, candidates, bounds, records ------------------------------------------------------------------------------


def test_windows_share_no_token_and_take_turns() -> None:
    texts = [("a", "x", range(1000)), ("b", "y", range(5000, 7500))]
    found = windows(texts, [0], 101, 8, 4, 8)
    assert [one.number for one in found] == list(range(12))
    assert sum(one.held_out for one in found) == 8
    assert {one.prompt.facts["text"] for one in found if not one.held_out} == {"a", "b"}
    taken = [id_ for one in found for id_ in [*one.prompt.context, *one.prompt.question, one.prompt.expected[-1]][1:]]
    assert len(taken) == len(set(taken)) == 12 * 100
    assert all(one.prompt.tokens == 100 and one.prompt.context[0] == 0 for one in found)
    assert shared([10, 25], 12) == [3, 9]
    assert shared([1, 25], 26) == [1, 25]
    with pytest.raises(ValueError, match="4 windows to choose by and 40 to verify on, of 101 tokens each, need 4400"):
        windows(texts, [0], 101, 8, 4, 40)
    with pytest.raises(ValueError, match="a window of 10 tokens does not hold the 8"):
        windows(texts, [0], 10, 8, 1, 1)


def test_candidates_are_what_fits() -> None:
    found = candidates(["quest", "dense", "quest:page=64"], [8, 32, 64, 600], 1024)
    assert [[str(role) for role in group] for group in found] == [
        ["window"],
        ["window at 32", "window at 64"],
        ["quest at 32", "quest at 64"],
        ["quest:page=64 at 64"],
    ]
    assert candidates(["quest"], [32], 1024, windows=False)[0:2] == [[Role("window")], [Role("quest", 32)]]
    with pytest.raises(ValueError, match="8 rows is less than one span"):
        candidates(["quest"], [8], 1024)
    with pytest.raises(ValueError, match="no selector is called 'qest'"):
        candidates(["qest"], [8], 1024)


def test_an_error_is_a_share_of_one_of_three_measures() -> None:
    record = {"kl": 0.02, "same_top": 0.95, "nll_difference": -0.01}
    assert [Bound(name, 0.01).loss(record) for name in ("kl", "top", "nll")] == pytest.approx([0.02, 0.05, -0.01])
    assert [Bound(name, 0.01).limit for name in ("kl", "top", "nll")] == pytest.approx(
        [math.log(1.01), 0.01, math.log(1.01)]
    )
    assert Bound("kl", 0.01).share(math.log(1.01)) == pytest.approx(0.01)
    assert (parse_error("1%"), parse_error("0.02")) == (0.01, 0.02)
    for wrong, words in ((("kl", 0.0), "above 0 and below 100 %"), (("mse", 0.1), "one of kl, top, nll, got 'mse'")):
        with pytest.raises(ValueError, match=words):
            Bound(*wrong)
    with pytest.raises(ValueError, match="--error is a share"):
        parse_error("little")


def test_records_go_on_where_they_stopped(tmp_path: Path) -> None:
    path = tmp_path / "recommend.jsonl"
    records = TrialRecords(path, {"model": "m", "last": 4})
    point = {"budget": 64, "kl": 0.1, "kl_heads": [0.1], "error_heads": [0.2], "bytes_heads": [3.0]}
    line = {"number": 0, "layer": 1, "method": "quest", "source": "0", "points": [point]}
    records.add("frontier", line)
    with path.open("ab") as file:
        file.write(b'{"record": "fron')
    again = TrialRecords(path, {"model": "m", "last": 4})
    assert again.of("frontier") == records.found == [{"record": "frontier", **line}]
    assert path.read_bytes().endswith(b"}\n")
    with pytest.raises(ValueError, match=r"is of another last \(4, now 5\): name another folder, or remove that file"):
        TrialRecords(path, {"model": "m", "last": 5})
    path.write_text('{"layer": 1}\n')
    with pytest.raises(ValueError, match="line 1 is no record of this command"):
        TrialRecords(path, {})


# -- the command -------------------------------------------------------------------------------------------------------

SHORT = ["--model", "reference", "--text", "alice", "--length", 320, "--last", 8, "--windows", 2, "--held-out", 3]
SHORT += ["--draws", 4, "--budget", "32,64,128", "--selector", "quest", "--selector", "lowbit"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["recommend", *map(str, arguments)])


def test_the_next_command_is_one_that_runs(tmp_path: Path) -> None:
    done = run(*SHORT, "--window", 32, "--error", "10%", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("Next: sparseattn eval"))
    words = shlex.split(said.removeprefix("Next: sparseattn ").replace("OTHER_TEXT", "alice"))
    assert words[words.index("--window") + 1] == "32"
    short = ["--last", "8", "--samples", "1", "--no-figures", "--out", str(tmp_path / "eval")]
    again = CliRunner().invoke(app, [*words, *short])
    assert again.exit_code == 0, again.output


def test_choices_that_an_engine_serves_by_other_pages_are_apart() -> None:
    tail = "tailed:inner=quest,rows=64"
    roles = [Role("dense"), Role("quest", 64), Role("quest", 32), Role(tail, 64), Role("window")]
    found = _families({0: [LayerOption(role, 0.0, [0.0], [1.0]) for role in roles]})
    methods = [{choice.role.method for choice in family[0]} for family in found]
    assert methods == [{"dense", "window", "quest"}, {"dense", "window", tail}]


def test_a_method_that_does_not_say_what_it_reads_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from sparseattn import Quest\n\n\nclass Quiet(Quest):\n    def scan(self, query, sealed, budget):\n"
    (tmp_path / "quietly.py").write_text(text + "        return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = run(*SHORT, "--selector", "quietly:Quiet", "--error", "10%", "--out", tmp_path)
    assert done.exit_code == 2
    assert "quietly:Quiet does not say what choosing reads" in " ".join(done.output.split())


def test_it_recommends_a_plan_that_was_verified_and_goes_on_from_its_records(tmp_path: Path) -> None:
    done = run(*SHORT, "--error", "10%", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "Cost",
        "Error (kl)",
        "Best single method at this error",
        "Plan",
        "Next",
    ]
    stages = [line for line in done.stderr.splitlines() if re.match(r"sparseattn: \d:\d\d:\d\d ", line)]
    assert "load reference" in stages[0]
    assert [line.split(", ")[-1] for line in stages[1:3]] == ["window 1 of 2", "window 2 of 2"]
    assert any("search 1: a plan on 2 windows" in line for line in stages)
    assert any("verification 1: a plan on 3 windows" in line for line in stages)
    plan = Plan.load(tmp_path / "plan.json")
    assert set(plan.layers) == {0, 1, 2, 3}
    assert plan.name == "reference-10%"
    made: dict[str, Any] = plan.made
    assert made["verified"]["kl"]["mean"] <= made["bound"]["limit"] == pytest.approx(math.log(1.1))
    low, high = made["verified"]["kl"]["interval"]
    assert low < made["verified"]["kl"]["mean"] < high
    assert 0 < made["cost"]["plan"] < made["cost"]["full"]
    assert made["cost"]["plan"] / made["cost"]["full"] == pytest.approx(
        made["verified"]["bytes_share"]["mean"], rel=0.1
    )
    assert [one["name"] for one in made["texts"]] == ["alice"]
    page = (tmp_path / "plan.md").read_text()
    assert "| 3 | " in page
    assert "3 held-out windows, 24 tokens" in page
    assert "What the plan gives each layer" in (tmp_path / "report.html").read_text()
    lines = (tmp_path / "recommend.jsonl").read_bytes()
    tried = [json.loads(line) for line in lines.splitlines() if b'"trial"' in line]
    held = [one["kl"] for one in tried if one["source"].split()[-1] == plan.source().split()[-1]]
    assert len(held) == 2 + 3, "what was saved is what was run, on windows to choose by and on those held out"
    assert lines.count(b'"frontier"') == 2 * 4 * 4
    (where,) = (json.loads(line) for line in lines.splitlines() if b'"versions"' in line)
    assert where["versions"]["torch"] == torch.__version__
    assert [one["versions"] for one in made["measured"]] == [where["versions"]]
    again = run(*SHORT, "--error", "10%", "--out", tmp_path, "--json")
    assert (tmp_path / "recommend.jsonl").read_bytes() == lines, "nothing was measured again"
    assert json.loads(again.stdout)["layers"] == plan.records()
    begun = b"".join(lines.splitlines(keepends=True)[:12])
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "recommend.jsonl").write_bytes(begun)
    resumed = run(*SHORT, "--error", "10%", "--out", tmp_path / "stopped", "--json")
    assert json.loads(resumed.stdout)["layers"] == plan.records(), "stopped amid the layers, it comes to the same"
    assert (tmp_path / "stopped" / "recommend.jsonl").read_bytes().startswith(begun)
    other = run(*SHORT, "--last", 9, "--out", tmp_path)
    assert other.exit_code == 2
    assert "is of another last (8, now 9)" in " ".join(other.output.split())


@pytest.mark.slow
def test_other_bounds_measures_and_machines_go_on_from_the_same_records(tmp_path: Path) -> None:
    assert run(*SHORT, "--error", "10%", "--out", tmp_path).exit_code == 0
    plan, lines = Plan.load(tmp_path / "plan.json"), (tmp_path / "recommend.jsonl").read_bytes()
    tighter = run(*SHORT, "--error", "2%", "--out", tmp_path)
    assert tighter.exit_code == 0, tighter.output
    more = (tmp_path / "recommend.jsonl").read_bytes()
    assert more.startswith(lines)
    assert more.count(b'"frontier"') == lines.count(b'"frontier"')
    assert Plan.load(tmp_path / "plan.json").made["cost"]["plan"] > plan.made["cost"]["plan"]
    for more, unit in (
        (["--measure", "top", "--by", "layer", "--error", "30%"], "bytes"),
        (["--machine", "a100", "--context", "64k", "--batch", 64, "--error", "20%"], "seconds"),
    ):
        other = run(*SHORT, *more, "--out", tmp_path, "--plan", tmp_path / "other.json")
        assert other.exit_code == 0, other.output
        found = Plan.load(tmp_path / "other.json")
        assert found.made["cost"]["unit"] == unit
        assert found.name != plan.name
        assert (tmp_path / "other.md").exists()
    assert found.name == "reference-20%-a100-64k-batch64"
    assert "predicted cost" in (tmp_path / "other.md").read_text()
    everything = (tmp_path / "recommend.jsonl").read_bytes()
    assert everything.count(b'"frontier"') == lines.count(b'"frontier"')


def test_a_plan_by_bytes_is_tried_where_no_prediction_is_faster_and_too_few_windows_are_said(tmp_path: Path) -> None:
    """At 320 tokens launches cost an H100 more than rows, so nothing is predicted to be faster than full attention."""
    done = run(*SHORT, "--windows", 1, "--held-out", 1, "--error", "70%", "--machine", "h100", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert said.startswith(
        "No configuration that costs less than full attention keeps 70 % of kl on the held-out windows."
    )
    assert "So this plan is chosen by bytes read. Its step is predicted to take " in said
    assert "full attention's predicted seconds on h100." in said
    assert "Warning: an interval of the error needs 3 held-out windows or more, got --held-out 1" in said
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.name == "reference-70%-h100-by-bytes"
    assert (plan.made["cost"]["unit"], plan.made["cost"]["machine"]) == ("bytes", None)
    assert plan.made["instead"] in (tmp_path / "plan.md").read_text()


def test_a_plan_that_cannot_be_exported_is_still_said(tmp_path: Path) -> None:
    given = [*SHORT, "--windows", 1, "--held-out", 1, "--budget", "8,64", "--error", "70%", "--by", "layer"]
    done = run(*given, "--export", "trtllm", "--out", tmp_path)
    assert done.exit_code == 2
    assert "Cost: " in done.stdout, "what was measured comes first"
    said = " ".join(done.stderr.split())
    assert f"{tmp_path / 'plan.json'} is written, but not for --export trtllm: TensorRT-LLM has" in said
    assert "quest is tried without --budget 8: a budget of 8 rows is less than one span of quest" in said
    assert "lowbit is tried without" not in said
    assert (tmp_path / "plan.json").exists()


def test_what_no_configuration_keeps_is_said(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("of an earlier run")
    done = run(*SHORT[:-4], "--selector", "random", "--error", "1e-14%", "--out", tmp_path)
    assert done.exit_code == 2
    assert (
        "no configuration that costs less than full attention keeps 1e-14 % of kl on the held-out windows"
        in " ".join(done.output.split())
    )
    assert "plan.json is of an earlier run" in " ".join(done.output.split())
    assert (tmp_path / "plan.json").read_text() == "of an earlier run"
    assert not (tmp_path / "plan.md").exists(), "the page beside it would be of another run"
    (tmp_path / "plan.json").unlink()
    assert run(*SHORT[:-4], "--selector", "random", "--error", "1e-14%", "--out", tmp_path).exit_code == 2
    assert (tmp_path / "plan.md").read_text().startswith("# No plan")


def test_for_vllm_it_recommends_what_vllm_serves(tmp_path: Path) -> None:
    given = [*SHORT[:-6], "--selector", "quest", "--selector", "lowbit:page=16", "--budget", "32,64", "--for", "vllm"]
    there = ["--machine", "h100", "--context", "128k", "--batch", 8]  # else launches cost more than rows
    done = run(*given, *there, "--error", "20%", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "# measured at 320 tokens; serve is sparse above 8,000" in " ".join(done.stdout.split())
    plan = Plan.load(tmp_path / "plan.json")
    assert Settings.of_plan(plan).shape[0] == 16
    assert plan.made["cost"]["unit"] == "seconds"
    assert plan.made["cost"]["predicted"]
    assert "predicted time on h100" in (tmp_path / "plan.md").read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--error", "200%"], "an error is a share above 0 and below 100 %"),
        (["--measure", "mse"], "an error is measured by one of kl, top, nll"),
        (["--context", "128m"], "--context takes a number of tokens such as 32768, 128k or 1M"),
        (["--for", "vllm", "--selector", "lowbit:scales=8"], "'lowbit:scales=8' cannot be served: its 8-bit levels"),
        (["--for", "vllm", "--by", "head"], "leave out --by head"),
        (["--for", "vllm", "--budget", "1%"], "vLLM needs budgets in tokens, such as --budget 64,256, got 1%"),
        (["--plan", "plan"], "--plan must end in .json"),
        (["--machine", "h100", "--budget", "mass:0.5"], "what mass:0.5 reads is measured, not predicted"),
        (["--budget", "64,all"], "--budget takes tokens, shares or masses, got 'all'"),
        (["--machine", "h100", "--selector", "retrieval"], "the cost of 'retrieval' in layer 0 is not known"),
        (["--machine", "b300"], "a machine is one of"),
        (["--selector", "infinigen"], "'infinigen' goes by the query of the layer before"),
        (["--selector", "kascade:anchors=[0]"], "goes by the choice of another layer"),
        (["--windows", "0"], "--windows must be 1 or more"),
        (["--last", "319"], "--length 320 does not hold the --last 319 tokens to decode and 2 before them"),
        (["--sink", "600"], "--sink 600 and --window 64 read all 312 rows of a window before its --last 8"),
        (["--sink", "200"], "--budget 64 has no effect: a window before its --last 8 has 312 rows"),
        (["--budget", "32,160"], "--budget 160 is half of --length 320 or more"),
        (["--drafts", "3"], "--drafts needs --lossless"),
        (["--length", "20000"], "positions, --length takes 20000"),
        (["--text", "bob"], "bob is neither a file nor one of the texts by name"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(tmp_path: Path, more: list[str], words: str) -> None:
    done = run(*SHORT, *more, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_the_same_text_under_two_names_is_no_text_held_out(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("The same words. " * 100)
    done = run(*SHORT, "--text", tmp_path / "a.txt", "--text", tmp_path / "b.txt", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "b.txt and a.txt are the same text: name it once" in " ".join(done.output.split())


def test_records_of_another_command_that_are_damaged_cost_the_page_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench.jsonl").write_text('{"broken')
    assert _page(tmp_path) is None
    assert "no page of these records: " in capsys.readouterr().err
