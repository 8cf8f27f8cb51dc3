"""The pictures of `bench --by-layer`: what methods recover by layer, and how alike they order the heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparseattn.evaluation.by_head import Comparison
from sparseattn.evaluation.measure_table import measure
from sparseattn.reporting.layer_tables import condition
from sparseattn.reporting.line_style import broken, name_ends, style
from sparseattn.reporting.plots.panels import heading, panel_grid, save, shares_up, shown


def by_layer(compared: Sequence[Comparison], path: Path) -> None:
    """Draw the share recovered against the layer, a line a method: a panel a condition of one trace."""
    labels = list(dict.fromkeys(label for comparison in compared for label in comparison.readings))
    figure, axes = panel_grid(len(compared), 1, (5.0, 2.8), labels, sharex=True, sharey=True)
    for axis, comparison in zip(axes[:, 0], compared, strict=True):
        for label, reading in comparison.readings.items():
            axis.plot(comparison.layers, reading.layers("recovered").tolist(), **style(labels.index(label), label))
        axis.set_title(f"at {condition(comparison)}", fontsize=10)
        axis.set_ylabel(measure("recovered").short)
        shares_up(axis)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xticks(compared[0].layers)
    axes[-1, 0].tick_params(labelsize=8)
    axes[-1, 0].set_xlabel("layer")
    trace = next(iter(compared[0].readings.values())).low.trace
    heading(figure, shown(f"{trace}: attention on indexed rows that each method recovers, mean over heads"))
    name_ends(figure, axes[:, 0])
    save(figure, path)


def alike(compared: Sequence[Comparison], path: Path) -> None:
    """Draw Spearman's rank correlation of the heads of every two methods: a panel a condition of one trace.

    Methods that recover the same at every head, such as the window nothing, have no order and are left out.
    """
    most = max(len(comparison.readings) for comparison in compared)
    figure, axes = panel_grid(1, len(compared), (2.2 + 0.55 * most, 1.5 + 0.5 * most), ())
    for axis, comparison in zip(axes[0], compared, strict=True):
        ranks = comparison.correlation()
        ordered = ~ranks.diagonal().isnan()
        names = [
            broken(shown(label)) for label, kept in zip(comparison.readings, ordered.tolist(), strict=True) if kept
        ]
        cells = ranks[ordered][:, ordered].tolist()
        axis.set_title(f"at {condition(comparison)}, {comparison.count()} heads", fontsize=10)
        axis.set_xticks(range(len(names)), names, fontsize=7, rotation=45, ha="right", rotation_mode="anchor")
        axis.set_yticks(range(len(names)), names, fontsize=7)
        if not names:
            continue
        image = axis.imshow(cells, vmin=-1.0, vmax=1.0, cmap="coolwarm")
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                colour = "white" if abs(value) > 0.75 else "black"  # on the ends of the scale, which are dark
                axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        figure.colorbar(image, ax=axis, label="rank correlation", shrink=0.8)
    trace = next(iter(compared[0].readings.values())).low.trace
    heading(figure, shown(f"{trace}: do methods fail at the same heads? By the share recovered"))
    save(figure, path)
