"""The pictures of `inspect`: where queries lie, which rows heads need, and what pages make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparseattn.evaluation.attention_stats import COUNTS, PAGES, Inspection
from sparseattn.evaluation.measure_table import BEST, NEEDED, measure
from sparseattn.reporting.line_style import COLOURS, name_ends, style
from sparseattn.reporting.plots.panels import COUNT, SHARE, bare_grid, heading, save, shown, unit

COLUMNS = 4  # panels beside each other, of pictures with one a layer
HEADS = 10  # that are numbered, or have a tick, in such a panel
PAGE = PAGES[0]
# Measure -> title of its panel, which is narrow: the label in two lines, told in order.
PANELS = {
    "distance_ratio": "distance of queries from the keys\nover that of other keys",
    "far_mass": "attention\nbeyond sink and window",
    f"top_share@{NEEDED}": f"of that, on the\n{NEEDED} best rows",
    "overlap@1": "of these rows, needed\nby the token before too",
    f"slack@{PAGE}": "Quest's bound less the page's largest\nlogit, in standard deviations",
    f"rank@{PAGE}": "rank correlation of the two",
    f"hits@{PAGE}": f"of the {BEST} best pages,\nfound by the bound",
    f"bound_share@{PAGE}": f"attention beyond sink and window, on\n{NEEDED // PAGE} pages of the bound",
}


def inspection(measured: Inspection, path: Path) -> None:
    """Draw eight measures, a panel each: a point a query head over the layers, and each layer's mean as a line."""
    layers = measured.layers
    figure, axes = bare_grid(len(PANELS), 4, (max(9.0, 1.6 + 4 * 0.05 * len(layers)), 5.6), sharex=True)
    for axis, (key, title) in zip(axes.flat, PANELS.items(), strict=True):
        known = measure(key)
        for x, layer in enumerate(layers):
            heads = measured.heads[layer][key].tolist()
            axis.plot([x] * len(heads), heads, "o", color=COLOURS[0], markersize=3.5, alpha=0.5, markeredgewidth=0)
        axis.plot([measured.mean(key, layer) for layer in layers], color=COLOURS[1], linewidth=1.4)
        least = min(float(head[key].nan_to_num().min()) for head in measured.heads.values())
        top = None if known.top is None else 1.03 * known.top
        axis.set_ylim(bottom=min(-0.03 * (known.top or 0.0), least), top=top)
        axis.yaxis.set_major_formatter(unit(known))
        axis.set_title(title, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        step = -(-len(layers) // 10)
        axis.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    for axis in axes[1]:
        axis.set_xlabel("layer", fontsize=9)
    heading(figure, f"{_where(measured)}, pages of {PAGE}; one point per query head, and their mean")
    save(figure, path)


def needed_rows(measured: Inspection, path: Path) -> None:
    """Draw the share of the attention beyond sink and window on the best rows, against their number: a panel a layer, a
    line a query head, named where few are."""
    figure, axes = _a_panel_a_layer(measured)
    for axis, heads in zip(axes, measured.heads.values(), strict=False):
        shares = torch.stack([heads[f"top_share@{k}"] for k in COUNTS], 1).tolist()  # [H*G][k]
        order = sorted(range(len(shares)), key=lambda head: shares[head][0])
        named = set(order) if len(order) <= HEADS else {order[0], order[-1]}
        for head, line in enumerate(shares):
            look = style(head, str(head) if head in named else "_")
            axis.plot(COUNTS, line, **{**look, "markersize": 3.5, "linewidth": 1.1})
        axis.set_xscale("log", base=4)
        axis.set_xticks(COUNTS)
        axis.xaxis.set_major_formatter(COUNT)
        axis.minorticks_off()
    figure.supxlabel("best rows", fontsize=9)
    few = all(len(heads["far_mass"]) <= HEADS for heads in measured.heads.values())
    heading(
        figure,
        f"{_where(measured)}: share of the attention beyond sink and window on the best rows; one line per query head, "
        f"{'numbered' if few else 'least and most numbered'}",
    )
    name_ends(figure, axes[: len(measured.layers)])
    save(figure, path)


def needed_pages(measured: Inspection, path: Path) -> None:
    """Draw what as many rows hold of the attention beyond sink and window, chosen singly, as pages by their largest
    logits, and as pages by Quest's bounds: a panel a layer, three marks a query head."""
    series = {
        f"top_share@{NEEDED}": f"best {NEEDED} rows",
        f"best_share@{PAGE}": f"best {NEEDED // PAGE} pages",
        f"bound_share@{PAGE}": f"{NEEDED // PAGE} pages by bound",
    }
    figure, axes = _a_panel_a_layer(measured)
    for axis, heads in zip(axes, measured.heads.values(), strict=False):
        shares = {label: heads[key].tolist() for key, label in series.items()}
        best, *_, bound = shares.values()
        axis.vlines(range(len(best)), bound, best, color="grey", linewidth=0.8, alpha=0.6)
        for k, (label, values) in enumerate(shares.items()):
            axis.plot(values, **{**style(k, label), "linestyle": "none", "markersize": 4})
        axis.set_xticks(range(0, len(best), -(-len(best) // HEADS)))
        axis.set_xlim(-0.5, len(best) - 0.5)
    figure.supxlabel("query head", fontsize=9)
    heading(
        figure,
        f"{_where(measured)}: share of the attention beyond sink and window in {NEEDED} rows, pages of {PAGE}",
    )
    name_ends(figure, [axes[min(COLUMNS, len(measured.layers)) - 1]])
    save(figure, path)


def _where(measured: Inspection) -> str:
    return shown(f"{measured.trace}, last {measured.settings['last']} of {measured.settings['tokens']} tokens")


def _a_panel_a_layer(measured: Inspection) -> tuple[Any, Any]:
    """Return a figure and a flat array of panels of shares."""
    columns = min(COLUMNS, len(measured.layers))
    size = (max(7.5, 0.5 + 2.5 * columns), 0.9 + 1.9 * -(-len(measured.layers) // columns))
    figure, axes = bare_grid(len(measured.layers), columns, size, sharey=True)
    for axis, layer in zip(axes.flat, measured.layers, strict=False):
        axis.set_title(f"layer {layer}: {measured.mean('far_mass', layer):.0%} lies there", fontsize=8)
        axis.set_ylim(0, 1.03)
        axis.yaxis.set_major_formatter(SHARE)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    return figure, axes.flat
