"""`sparseattn recommend`: which method and budget each layer of a model should have, for an error to live with."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from sparseattn.cli.command import errors
from sparseattn.cli.recommend_options import RecommendOptions
from sparseattn.cli.report import write_report
from sparseattn.cli.results import own_folder, results_folder
from sparseattn.recommend.exports import NoExportError, export_plan
from sparseattn.reporting.terminal import plain
from sparseattn.roles.plan import Plan
from sparseattn.serving.vllm.settings import Settings
from sparseattn.utils.files import write_atomic
from sparseattn.utils.ranks import of_job


def run(options: RecommendOptions) -> None:
    """Run `sparseattn recommend`."""
    ranks = of_job()
    if options.lossless:
        if ranks:
            raise ValueError(
                "--lossless times drafts, which other processes would slow down: start it without torchrun"
            )
        from sparseattn.cli.recommend_lossless import run as run_lossless

        results_folder(options.out)
        run_lossless(options)
        return
    from sparseattn.cli.recommend_search import NoPlanError, search
    from sparseattn.cli.recommend_show import page, say

    path = options.plan_path
    why = path.with_suffix(".md")
    with own_folder(options.out, "recommend", ranks):
        if not path.parent.is_dir():
            raise ValueError(f"the folder of --plan does not exist: {path.parent}")
        try:
            result = search(options, options.out / "recommend.jsonl", ranks)
        except NoPlanError as error:
            if ranks and not ranks.first:
                return  # the first process says so
            if path.exists():
                raise NoPlanError(f"{error} {path} is of an earlier run.") from None
            write_atomic(why, f"# No plan\n\n{error}\n".encode())
            raise
        if ranks and not ranks.first:
            return
        if options.vllm:
            Settings.of_plan(result.plan)
        result.plan.save(path)
        write_atomic(why, page(result).encode())
        drawn = _page(options.out)
        if options.json:
            typer.echo(json.dumps(result.plan.record()))
        else:
            say(result, path, why, drawn)
        for line in [] if options.export is None else _export(options.export.value, result.plan, path):
            if not options.json:
                typer.echo(line)


def _page(out: Path) -> Path | None:
    """Return the page of the folder's records; None, and why is said, where those of another command are damaged."""
    try:
        return write_report([out], out / "report.html")
    except ValueError as error:
        errors.print(plain(f"no page of these records: {error}"), soft_wrap=True)
        return None


def _export(to: str, plan: Plan, path: Path) -> list[str]:
    """Write the plan as another project's settings beside it, and return what to say of that."""
    try:
        exported = export_plan(plan, to)
    except NoExportError as why:
        raise NoExportError(f"{path} is written, but not for --export {to}: {why}") from None
    target = path.with_suffix(f".{to}.json")
    write_atomic(target, (json.dumps(exported.settings, indent=1) + "\n").encode())
    return [f"{to}: {target}", *(f"not the same there: {why}" for why in exported.differs)]
