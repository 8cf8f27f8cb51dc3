"""Matplotlib's SVG made to follow its reader's theme: in the dark, rules replace the colours that it was drawn in."""

from __future__ import annotations

from sparseattn.reporting.line_style import COLOURS, DARK

INK = ("#1d1f23", "#e7e8ea")  # light, dark
PAPER = ("#fcfcfa", "#14161a")  # painted, so that a reader is never shown ink of one theme on the paper of another
# What a figure is drawn in -> what that is in the dark.
DARKER = {
    **dict(zip(map(str.lower, COLOURS), DARK, strict=True)),
    "#000000": INK[1],
    PAPER[0]: PAPER[1],
    "#c7c7c7": "#4b5059",
    "#b0b0b0": "#5b616b",
    "#808080": "#8d939d",
}


def themed(svg: str) -> str:
    """Return the SVG with the rules for a dark theme (`prefers-color-scheme`), of the colours that it uses.

    A viewer that knows no such rules shows it as it was drawn.
    """
    dark = [
        f'[style*="{part}: {light}"]{{{part}:{colour}!important}}'
        for light, colour in DARKER.items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg
    ]
    rules = "\n".join(
        (f"svg{{fill:{INK[0]}}}", "@media (prefers-color-scheme:dark){", f"svg{{fill:{INK[1]}}}", *dark, "}")
    )
    return svg.replace("</style>", f"\n{rules}</style>", 1)
