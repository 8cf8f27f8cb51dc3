"""The command: train (or resume), export, evaluate, and write the model card."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from scripts.reference.card import export, model_card
from scripts.reference.figures import evaluate, print_figures
from scripts.reference.text import load_corpus
from scripts.reference.training import train
from sparseattn.utils.files import write_atomic

REPOSITORY = Path(__file__).resolve().parents[2]
EXPORT_DIR = REPOSITORY / "sparseattn" / "data" / "reference"
WORK_DIR = REPOSITORY / "build" / "reference"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reference",
        description="Train, export and evaluate the built-in reference model of sparseattn.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=WORK_DIR, help="where the state to resume from is kept")
    parser.add_argument("--export-dir", type=Path, default=EXPORT_DIR, help="where weights and model card go")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="stop training after this step, and export nothing")
    parser.add_argument("--eval-only", action="store_true", help="print the figures of the exported weights")
    parser.add_argument("--quick", action="store_true", help="with --eval-only: distances up to 1,024 only")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    console = Console()
    # Another number of threads sums in another order, and so gives slightly different weights.
    torch.set_num_threads(options.threads)
    corpus = load_corpus()
    console.print(
        f"text: {corpus.files} + {corpus.held_out_files} held-out files, sha256 {corpus.digest}", soft_wrap=True
    )
    if options.eval_only:
        print_figures(evaluate(options.export_dir, corpus, options.seed, options.quick), console)
        return
    model, spent = train(
        corpus,
        console,
        seed=options.seed,
        state=options.work_dir / "state.safetensors",
        stop_at=options.stop_at,
        save_every=options.save_every,
        log_every=options.log_every,
    )
    if options.stop_at:
        return
    export(model, options.export_dir)
    figures = evaluate(options.export_dir, corpus, options.seed, quick=False)
    print_figures(figures, console)
    card = model_card(options.export_dir, figures, corpus, options.seed, spent)
    write_atomic(options.export_dir / "README.md", card.encode())
    console.print(f"exported to {options.export_dir} after {spent.wall:.0f} s of training")


if __name__ == "__main__":
    main()
