"""The options of `sparseattn train`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparseattn.cli import completion, values
from sparseattn.cli import options as shared
from sparseattn.cli.calibrate_options import DUO, KASCADE, MASS, BeforeRope, CalibrateOptions, Fitted, Last, Window
from sparseattn.cli.calibrate_options import METHODS as CALIBRATED

if TYPE_CHECKING:
    from sparseattn.training import CodesRecipe, Filters, IndexRecipe, Recipe, RetainingRecipe, WindowRecipe

MADE = ("shares", "filters")  # fields of a recipe that are made of several options
SAAP, QUERYPQ, A2ATS, LOCRET = "saap", "querypq", "a2ats", "locret"
INDEXES = HATA, HASHATTENTION, INDEXER, SEER = "hata", "hashattention", "indexer", "seer"
TRAINED = (SAAP, QUERYPQ, A2ATS, *INDEXES, LOCRET)
METHODS = (*TRAINED, *CALIBRATED)
ALL = ("method", "traces", "out", "layers", "device", "json")  # options of every method
OWNERS = {  # of other options; those that are not here are of `SAAP`
    "seed": TRAINED,
    "sample": (SAAP, QUERYPQ, A2ATS),
    "queries": (SAAP, QUERYPQ, A2ATS, KASCADE, DUO),
    "sink": (SAAP, DUO, MASS),
    "steps": (SAAP, *INDEXES, LOCRET),
    "rate": (SAAP, *INDEXES, LOCRET),
    "hidden": (SAAP, LOCRET),
    "answer": (LOCRET,),
    "bits": (QUERYPQ, A2ATS),
    **dict.fromkeys(("subspaces", "reach", "ahead", "mean", "distil"), (QUERYPQ,)),
    "width": INDEXES,
    "objective": (HATA,),
    "before_rope": ("loki",),
    "window": (DUO, MASS),
    **dict.fromkeys(("selector", "last"), (MASS,)),
}
GROUPS = {  # of options, in help
    "What to make": ("method", "out", "layers", "device", "seed", "json"),
    "Options of several methods": ("sample", "queries", "steps", "rate", "hidden", "sink"),
    f"Only {SAAP}": (
        *("held_out", "clusters", "iterations", "batch", "keys", "decay", "gap", "near"),
        *("shares", "validate", "patience", "dtype", "residual", "save_every"),
    ),
    f"Ablations of {SAAP}": ("roped", "short_range", "per_query_head", "two_sided", "symmetric", "reverse"),
    "Codebooks, learned indexes and retaining heads": (
        *("subspaces", "bits", "reach", "ahead", "mean", "distil", "width", "objective", "answer"),
    ),
    "Calibrations": ("before_rope", "selector", "window", "last"),
}


@dataclass(frozen=True)
class TrainOptions:
    """Train what a method learns from traces of prompts, or calibrate it. The same command resumes stopped training.

    `saap:artefact=FILE`, `loki:artefact=FILE` and so on use the result. For saap, `torchrun --nproc-per-node N -m
    sparseattn train ...` splits the KV heads over N processes.

    loki, doublesparsity, kascade, duo and mass are calibrated, not trained. For them `sparseattn calibrate` is
    another name of this command. Its help says what uses their files.
    """

    traces: Annotated[list[Path], typer.Argument(help="Trace files of many prompts of one model, or folders of them.")]
    out: Annotated[Path, typer.Option(help="File to write, NAME.safetensors.")]
    method: Annotated[
        str,
        typer.Option(
            help=f"What to train. {SAAP}: buckets and query classifiers; {QUERYPQ}: metric, rotation and codebooks; "
            f"{A2ATS}: metric and one codebook of keys before RoPE; {HATA}: directions of hash codes; "
            f"{HASHATTENTION}: networks of hash codes; {INDEXER}: maps to few dimensions; {SEER}: a gate of blocks; "
            f"{LOCRET}: retaining heads. Or what to calibrate. loki: directions of keys; doublesparsity: "
            f"channels; {KASCADE}: which layers choose alike; {DUO}: which heads need far tokens; {MASS}: a selector's "
            "estimates.",
            autocompletion=completion.one_of(METHODS),
        ),
    ] = SAAP
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            help="For saap: trace file or folder to validate on. Repeat the option for several. Default: 1 in 5 of the "
            "prompts in TRACES."
        ),
    ] = None
    layers: shared.Layers = None
    clusters: Annotated[
        int | None,
        typer.Option(
            help="Number of buckets per head. Default: 1024, or fewer so that a prompt has 32 tokens per bucket."
        ),
    ] = None
    sample: Annotated[
        int | None,
        typer.Option(
            help=f"Number of keys that k-means sees. Default: 256 per bucket, for {QUERYPQ} and {A2ATS} 32768."
        ),
    ] = None
    iterations: Annotated[int, typer.Option(help="Number of k-means iterations.")] = 25
    hidden: Annotated[
        int, typer.Option(help=f"Hidden width of the query classifier, or for {LOCRET} of its network.")
    ] = 1024
    answer: Annotated[
        int,
        typer.Option(help=f"For {LOCRET}: last tokens of a prompt that say how much those before are attended to."),
    ] = 256
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Largest number of training steps of the classifier (default: 2000), or for {', '.join(INDEXES)} "
            f"and {LOCRET} of steps of each layer (default: 500)."
        ),
    ] = None
    batch: Annotated[int, typer.Option(help="Queries per step, all from one prompt.")] = 1024
    queries: Annotated[
        int | None,
        typer.Option(
            help=f"Number of distinct queries, over all prompts: those that a classifier sees (default: 65536), or for "
            f"{QUERYPQ} and {A2ATS} those of each query head that make the metric (default: 8192). For {KASCADE} and "
            f"{DUO} those of each prompt to look at (default: 64)."
        ),
    ] = None
    keys: Annotated[
        int | None, typer.Option(help="Number of keys per prompt from which targets are computed. Default: all.")
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(
            help=f"Highest learning rate. Default: 0.001, or for {HATA} 0.01 (with --objective {HATA} 0.1), "
            f"for {INDEXER} 0.03, for {HASHATTENTION} and {SEER} 0.003, for {LOCRET} 0.0005."
        ),
    ] = None
    decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.01
    gap: Annotated[
        int | None,
        typer.Option(help="A query only counts keys that are more than GAP tokens before it. Default: 2047."),
    ] = None
    near: Annotated[
        int | None,
        typer.Option(help="Leave out queries whose best key is less than NEAR tokens before them. Default: 1024."),
    ] = None
    sink: Annotated[
        int | None,
        typer.Option(
            help=f"Number of first tokens of a prompt: for {SAAP} those that are left out (default: 1), for {MASS} and "
            f"{DUO} those that every query reads (default: 4)."
        ),
    ] = None
    shares: Annotated[str, typer.Option(help="Budgets for validation, as shares of the context, with commas.")] = (
        "0.01,0.05"
    )
    validate: Annotated[int, typer.Option(help="Number of steps between validations.")] = 100
    patience: Annotated[int, typer.Option(help="Stop a head after this many validations without progress.")] = 10
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0
    device: shared.Device = None
    dtype: Annotated[
        shared.Dtype, typer.Option(metavar="DTYPE", help=f"Dtype of the stored tensors: {', '.join(shared.Dtype)}.")
    ] = shared.Dtype.float16
    roped: Annotated[bool, typer.Option("--roped", help="Ablation: train on keys and queries after RoPE.")] = False
    short_range: Annotated[
        bool, typer.Option("--short-range", help="Ablation: no long-range filter, as --gap 0 --near 0.")
    ] = False
    residual: Annotated[
        bool, typer.Option("--residual", help="Add a linear path to the classifier, initialised with the mean keys.")
    ] = False
    per_query_head: Annotated[
        bool, typer.Option("--per-query-head", help="Ablation: one classifier per query head.")
    ] = False
    two_sided: Annotated[
        bool, typer.Option("--two-sided", help="Ablation: also count keys that come after the query.")
    ] = False
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Ablation: no classifier, only k-means.")] = False
    reverse: Annotated[bool, typer.Option("--reverse", help="Ablation: use the opposite direction of the KL loss.")] = (
        False
    )
    subspaces: Annotated[
        int, typer.Option(help=f"For {QUERYPQ}: number of subspaces per head; 0 means one per 2 * BITS channels.")
    ] = 0
    bits: Annotated[
        int | None,
        typer.Option(
            help=f"For {QUERYPQ}: bits of the code of a subspace, 4 (default) or 8; for {A2ATS}: of a key's name, 1 to "
            "12 (default)."
        ),
    ] = None
    reach: Annotated[
        float, typer.Option(help=f"For {QUERYPQ}: weight each key by its mean attention to this power, 0 to 1.")
    ] = 0.5
    ahead: Annotated[
        int, typer.Option(help=f"For {QUERYPQ}: number of tokens behind a prompt that its codes are made for too.")
    ] = 8192
    mean: Annotated[
        str,
        typer.Option(
            help=f"For {QUERYPQ}: mean key that codes leave out, rope for that before RoPE or plain, which a second "
            "stage needs.",
            autocompletion=completion.one_of(("rope", "plain")),
        ),
    ] = "rope"
    distil: Annotated[
        int,
        typer.Option(
            help=f"For {QUERYPQ}: number of steps that fit the codes of each layer to the attention afterwards."
        ),
    ] = 0
    width: Annotated[
        int,
        typer.Option(
            help=f"For {HATA} and {HASHATTENTION}: bits of a code (default: 128 and 32); for {INDEXER}: dimensions "
            f"(default: 8); for {SEER}: tokens of a block (default: 64).",
            show_default=False,
        ),
    ] = 0
    objective: Annotated[
        str,
        typer.Option(
            help=f"For {HATA}: attention, to agree with the model's attention, or hata, the loss of its paper.",
            autocompletion=completion.one_of(("attention", HATA)),
        ),
    ] = "attention"
    save_every: Annotated[int, typer.Option(help="Number of steps between saved states to resume from.")] = 100
    before_rope: BeforeRope = False
    selector: Fitted = None
    window: Window = CalibrateOptions.window
    last: Last = CalibrateOptions.last
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False

    def __post_init__(self) -> None:
        values.check_one_of("--method", self.method, METHODS)
        calibration = self.calibration  # which says itself which of its options do not go with the method
        known = () if calibration is None else [field.name for field in fields(calibration)]
        for field in fields(self):
            owners = METHODS if field.name in (*ALL, *known) else OWNERS.get(field.name, (SAAP,))
            if self.method not in owners and getattr(self, field.name) != field.default:
                needed = " or ".join(owners)
                raise ValueError(f"{shared.spelled([field.name])} needs --method {needed}, got --method {self.method}")
        if self.save_every < 1:
            raise ValueError(f"--save-every must be 1 or more, got {self.save_every}")
        if self.short_range and (self.gap is not None or self.near is not None):
            raise ValueError("--short-range means --gap 0 --near 0: leave out it or these")

    @property
    def calibration(self) -> CalibrateOptions | None:
        """The same as `sparseattn calibrate` takes it; None: the method is trained."""
        if self.method not in CALIBRATED:
            return None
        return CalibrateOptions(**self._given(*(field.name for field in fields(CalibrateOptions))))

    @property
    def filters(self) -> Filters:
        """Which pairs and queries training looks at."""
        from sparseattn.training import Filters

        default = Filters(0, 0) if self.short_range else Filters()
        gap = default.gap if self.gap is None else self.gap
        nearest = default.near if self.near is None else self.near
        return Filters(gap, nearest, default.sink if self.sink is None else self.sink, self.two_sided)

    @property
    def recipe(self) -> Recipe:
        """What decides the run; most of its fields are options of the same name."""
        from sparseattn.training import Recipe

        shares = tuple(values.decimals(self.shares, "--shares"))
        others = {field.name: getattr(self, field.name) for field in fields(Recipe) if field.name not in MADE}
        for name in ("queries", "steps", "rate"):
            if others[name] is None:
                del others[name]
        return Recipe(shares=shares, filters=self.filters, **others)

    @property
    def codes_recipe(self) -> CodesRecipe:
        """What decides a run of `QUERYPQ`."""
        from sparseattn.training import CodesRecipe

        given = self._given("sample", "queries", "bits")
        given |= {name: getattr(self, name) for name in ("reach", "ahead", "mean", "seed", "distil")}
        return CodesRecipe(self.subspaces, **given)

    @property
    def window_recipe(self) -> WindowRecipe:
        """What decides a run of `A2ATS`."""
        from sparseattn.training import WindowRecipe

        return WindowRecipe(seed=self.seed, **self._given("sample", "queries", "bits"))

    @property
    def retaining_recipe(self) -> RetainingRecipe:
        """What decides a run of `LOCRET`."""
        from sparseattn.training import RetainingRecipe

        return RetainingRecipe(self.hidden, answer=self.answer, seed=self.seed, **self._given("steps", "rate"))

    @property
    def index_recipe(self) -> IndexRecipe:
        """What decides a run of one of `INDEXES`."""
        from sparseattn.training import IndexRecipe

        return IndexRecipe(self.method, self.width, self.objective, seed=self.seed, **self._given("steps", "rate"))

    def _given(self, *names: str) -> dict[str, Any]:
        """Options of these names that were given."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
