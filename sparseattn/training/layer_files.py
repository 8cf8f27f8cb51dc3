"""A calibration that is learned layer by layer: finished layers lie in `OUT.partial` until the file is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.training.calibrate import meta_of
from sparseattn.training.partial import Partial, identity
from sparseattn.training.prompts import Prompts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def written_by_layer(
    method: str,
    prompts: Prompts,
    recipe: DataclassInstance,
    out: Path,
    learn: Callable[[Partial], None],
    fact: str,
    roped: bool = True,
) -> Calibration:
    """Let `learn` write the files of layers that have none, and return the calibration `out` that is made of all.

    Args:
        method: of the calibration.
        learn: is given the folder, which may hold layers of a run that was killed.
        roped: whether it is of keys after RoPE.
        fact: a number that each layer's file has beside its tensors; the calibration's meta has it by layer.

    Raises:
        TrainingError: a partial run of other traces or another recipe.
        CalibrationError: a file that cannot be written.
    """
    folder = Partial(Path(f"{out}.partial"), identity(recipe, prompts))
    folder.open()
    try:
        learn(folder)
    except BaseException:
        folder.remove_if_bare()
        raise
    read = {index: folder.read(folder.layer(index)) for index in prompts.shapes}
    meta = meta_of(prompts) | {
        "scales": {str(index): shape.scale for index, shape in prompts.shapes.items()},
        "recipe": asdict(recipe),
        fact: {str(index): facts[fact] for index, (_, facts) in read.items()},
    }
    tensors_of = {index: tensors for index, (tensors, _) in read.items()}
    Calibration(method, tensors_of, roped=roped, ropes=prompts.ropes, meta=meta).save(out)
    folder.remove()
    return Calibration.load(out)
