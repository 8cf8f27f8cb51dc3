"""The options of `sparseattn train`, and what its help says; see `cli.command`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseattn.cli import options as shared
from sparseattn.cli import values

if TYPE_CHECKING:
    from sparseattn.training import CodesRecipe, Filters, Recipe

MADE = ("shares", "filters")  # fields of a recipe that are made of several options
SAAP, QUERYPQ = "saap", "querypq"  # of --method
BOTH = ("method", "traces", "out", "layers", "sample", "queries", "seed", "device", "json")  # options of both
CODES = ("subspaces", "bits", "reach")  # of `QUERYPQ` alone; all others are of `SAAP`


@dataclass(frozen=True)
class TrainOptions:
    """Train a method on traces of many prompts; the same command resumes a run that was killed. `saap:artefact=FILE`
    and `querypq:artefact=FILE` use the result.

    Under `torchrun --nproc-per-node N -m sparseattn train ...` the KV heads are split over N processes, for saap.
    """

    traces: Annotated[list[Path], typer.Argument(help="Traces of many prompts of one model, or folders of them.")]
    out: Annotated[Path, typer.Option(help="Artefact to write, a .safetensors file.")]
    method: Annotated[
        str, typer.Option(help=f"{SAAP}: buckets and classifiers; {QUERYPQ}: metric, rotation and codebooks.")
    ] = SAAP
    held_out: Annotated[
        list[Path] | None, typer.Option(help="Traces to validate on; by default 1 prompt in 5 of TRACES.")
    ] = None
    layers: shared.Layers = None
    clusters: Annotated[
        int | None, typer.Option(help="Buckets of a head; default 1024, or fewer: 32 rows of a prompt to each.")
    ] = None
    sample: Annotated[
        int | None, typer.Option(help=f"Keys that k-means sees; default 256 a bucket, of {QUERYPQ} 32768.")
    ] = None
    iterations: Annotated[int, typer.Option(help="Iterations of k-means.")] = 25
    hidden: Annotated[int, typer.Option(help="Hidden width of the classifier.")] = 1024
    steps: Annotated[int, typer.Option(help="Most steps of the classifier.")] = 2000
    batch: Annotated[int, typer.Option(help="Queries of a step, all from one prompt.")] = 1024
    queries: Annotated[
        int | None,
        typer.Option(
            help=f"Distinct queries of a classifier, over all prompts; default 65536. Of {QUERYPQ} those of a query "
            "head for the metric; default 8192."
        ),
    ] = None
    keys: Annotated[int | None, typer.Option(help="Keys of a prompt that targets are taken over; default all.")] = None
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3
    decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.01
    gap: Annotated[int | None, typer.Option(help="Keys count for queries more than GAP behind them; default 2047.")] = (
        None
    )
    near: Annotated[
        int | None,
        typer.Option(help="Leave out queries whose best key is less than NEAR before them; default 1024."),
    ] = None
    sink: Annotated[int, typer.Option(help="First rows of a prompt that do not count.")] = 1
    shares: Annotated[str, typer.Option(help="Budgets of validation, as shares of the context.")] = "0.01,0.05"
    validate: Annotated[int, typer.Option(help="Steps between validations.")] = 100
    patience: Annotated[int, typer.Option(help="Validations without progress after which a head stops.")] = 10
    seed: Annotated[int, typer.Option(help="Of everything drawn at random.")] = 0
    device: shared.Device = None
    dtype: Annotated[
        shared.Dtype, typer.Option(metavar="DTYPE", help=f"What tensors are stored in: {', '.join(shared.Dtype)}.")
    ] = shared.Dtype.float16
    roped: Annotated[bool, typer.Option("--roped", help="Ablation: vectors as attention sees them.")] = False
    short_range: Annotated[
        bool, typer.Option("--short-range", help="Ablation: no long-range filter (gap 0, near 0).")
    ] = False
    residual: Annotated[
        bool, typer.Option("--residual", help="A linear path beside the classifier's layers, begun at mean keys.")
    ] = False
    per_query_head: Annotated[
        bool, typer.Option("--per-query-head", help="Ablation: a classifier for each query head.")
    ] = False
    two_sided: Annotated[bool, typer.Option("--two-sided", help="Ablation: later keys count as well.")] = False
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Ablation: no classifier, k-means alone.")] = False
    reverse: Annotated[bool, typer.Option("--reverse", help="Ablation: the other direction of the KL loss.")] = False
    subspaces: Annotated[
        int, typer.Option(help=f"{QUERYPQ}: subspaces of a head; default 0, one for every 2 * BITS channels.")
    ] = 0
    bits: Annotated[int, typer.Option(help=f"{QUERYPQ}: of a subspace's code, 4 or 8.")] = 4
    reach: Annotated[float, typer.Option(help=f"{QUERYPQ}: power of a key's mean attention that it counts for.")] = 0.5
    save_every: Annotated[int, typer.Option(help="Steps between two states to resume from.")] = 100
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False

    def __post_init__(self) -> None:
        values.check_one_of("--method", self.method, (SAAP, QUERYPQ))
        for field in fields(self):
            owner = None if field.name in BOTH else QUERYPQ if field.name in CODES else SAAP
            if owner not in (None, self.method) and getattr(self, field.name) != field.default:
                raise ValueError(f"{shared.spelled([field.name])} is for --method {owner}, got --method {self.method}")
        if self.save_every < 1:
            raise ValueError(f"--save-every is at least 1, got {self.save_every}")
        if self.short_range and (self.gap is not None or self.near is not None):
            raise ValueError("--short-range is --gap 0 --near 0, so give it or these")

    @property
    def filters(self) -> Filters:
        """Which pairs and queries training looks at."""
        from sparseattn.training import Filters

        default = Filters(0, 0) if self.short_range else Filters()
        gap = default.gap if self.gap is None else self.gap
        near = default.near if self.near is None else self.near
        return Filters(gap, near, self.sink, self.two_sided)

    @property
    def recipe(self) -> Recipe:
        """What decides the run; most of its fields are options of the same name."""
        from sparseattn.training import Recipe

        shares = tuple(values.decimals(self.shares, "--shares"))
        others = {field.name: getattr(self, field.name) for field in fields(Recipe) if field.name not in MADE}
        if self.queries is None:
            del others["queries"]
        return Recipe(shares=shares, filters=self.filters, **others)

    @property
    def codes_recipe(self) -> CodesRecipe:
        """What decides a run of `QUERYPQ`."""
        from sparseattn.training import CodesRecipe

        given = {name: getattr(self, name) for name in ("sample", "queries") if getattr(self, name) is not None}
        return CodesRecipe(self.subspaces, self.bits, reach=self.reach, seed=self.seed, **given)
