"""Plans in the words of other projects, where they have the same method with the same meaning; else why not.

Field names are those of TensorRT-LLM (`sparse_attention_config` of `LlmArgs`, 1.3), of the config.json that NVIDIA's
Model Optimizer writes (0.4x), of SGLang's server arguments (0.5) and of Unified Cache Manager (0.9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparseattn import __version__
from sparseattn.roles.plan import Plan
from sparseattn.roles.role import DENSE, Role
from sparseattn.roles.roles import ranges
from sparseattn.selectors.base import Selector
from sparseattn.selectors.pages.skipsoftmax import SkipSoftmax
from sparseattn.selectors.tokens.rocketkv import RocketKV


class NoExportError(ValueError):
    """A plan that another project cannot express, in one sentence."""


@dataclass(frozen=True)
class Exported:
    """A plan in another project's words.

    Args:
        settings: what its file holds, as JSON.
        differs: sentences on what is not the same there.
    """

    settings: dict[str, Any]
    differs: tuple[str, ...]


@dataclass(frozen=True)
class _Single:
    """A plan of one method: its role, and the layers that have it and those that are dense."""

    role: Role
    layers: list[int]
    dense: list[int]

    @property
    def selector(self) -> Selector:
        return self.role.selector


def export_plan(plan: Plan, to: str) -> Exported:
    """Return a plan as another project's settings.

    Args:
        plan: for one model.
        to: one of `FORMATS`.

    Raises:
        NoExportError: it has no such method, or not with the same meaning, or not for single layers.
        ValueError: no such format.
    """
    if to not in FORMATS:
        raise ValueError(f"plans are exported to {', '.join(FORMATS)}, got {to!r}")
    return FORMATS[to](plan)


def _single(plan: Plan, project: str) -> _Single:
    """Return the one method of a plan."""
    by_head = [layer for layer, role in plan.layers.items() if not isinstance(role, Role)]
    if by_head:
        raise NoExportError(
            f"{project} has one method for all heads of a layer, and plan {plan.name} has several in layers "
            f"{ranges(by_head)}: recommend without --by head"
        )
    roles = {layer: role for layer, role in plan.layers.items() if isinstance(role, Role)}
    dense = [layer for layer, role in roles.items() if role.method == DENSE]
    sparse = {layer: role for layer, role in roles.items() if role.method != DENSE}
    kinds = {role.label: role for role in sparse.values()}
    if len(kinds) != 1:
        raise NoExportError(
            f"{project} has one method with one setting for all layers, and plan {plan.name} has "
            f"{', '.join(sorted(kinds)) or 'none'}"
        )
    return _Single(next(iter(kinds.values())), list(sparse), dense)


def _zones(plan: Plan, project: str) -> list[str]:
    """Return what differs in the rows that every query reads."""
    if not plan.sink and plan.window <= 1:
        return []
    return [
        f"{project} has no sink and window that every query reads besides: the plan was measured with {plan.sink} and "
        f"{plan.window} rows"
    ]


def _unlike(project: str, single: _Single, why: str) -> NoExportError:
    return NoExportError(f"{project} has no method like {single.selector.label()}: {why}")


def trtllm(plan: Plan) -> Exported:
    """TensorRT-LLM: an options file for `--config`, of which JSON is a form of YAML."""
    project = "TensorRT-LLM"
    single = _single(plan, project)
    if single.dense:
        raise NoExportError(
            f"{project} has one sparse_attention_config for all layers, and plan {plan.name} leaves layers "
            f"{ranges(single.dense)} dense"
        )
    differs = _zones(plan, project)
    selector = single.selector
    if isinstance(selector, SkipSoftmax):
        differs.append(_every_tile(single))
        config: dict[str, Any] = {
            "algorithm": "skip_softmax",
            "threshold_scale_factor": {"prefill": 0.0, "decode": float(selector.scale)},
        }
        return Exported({"sparse_attention_config": config}, tuple(filter(None, differs)))
    if isinstance(selector, RocketKV):
        more = {"kv_cache_config": {"enable_block_reuse": False}, "enable_chunked_prefill": False}
        return Exported({"sparse_attention_config": _rocket(single, selector), **more}, tuple(differs))
    raise _unlike(project, single, "it has RocketKV (rocketkv), skip-softmax (skipsoftmax) and models' own indexes")


def _rocket(single: _Single, selector: RocketKV) -> dict[str, Any]:
    """Return TensorRT-LLM's settings of RocketKV."""
    budget, page = single.role.budget, selector.page_rows
    lacking = [
        words
        for words, holds in (
            ("prompt=ROWS, as it always drops rows of the prompt", selector.prompt > 0),
            ("channels=N, as it counts them", selector.channels > 0),
            ("a page that is a power of two", page & (page - 1) == 0),
            ("a budget of rows", isinstance(budget, int) and budget >= page),
            ("group=softmax, the paper's vote", selector.group == "softmax"),
        )
        if not holds
    ]
    if lacking:
        raise NoExportError(
            f"TensorRT-LLM's RocketKV means the same as rocketkv with {'; '.join(lacking)}; the plan has "
            f"{single.role.label}"
        )
    assert isinstance(budget, int)
    return {
        "algorithm": "rocket",
        "prompt_budget": selector.prompt,
        "window_size": selector.window,
        "kernel_size": selector.kernel,
        "page_size": page,
        "topk": budget // page,
        "topr": selector.channels,
        "kt_cache_dtype": "bfloat16",
    }


def _every_tile(single: _Single) -> str:
    """Return what a budget beside a threshold would change."""
    if single.role.budget is None or single.role.budget == "all":
        return ""
    return (
        f"skip-softmax there reads every tile above its threshold, and the plan at most {single.role.budget} rows: "
        f"measure it with a budget of all"
    )


def modelopt(plan: Plan) -> Exported:
    """NVIDIA's Model Optimizer: an entry of a checkpoint's config.json, which TensorRT-LLM and a vLLM worker read."""
    project = "Model Optimizer"
    single = _single(plan, project)
    selector = single.selector
    if not isinstance(selector, SkipSoftmax):
        raise _unlike(project, single, "of what it exports only skip-softmax (skipsoftmax) chooses rows by a query")
    group = {
        "algorithm": "skip_softmax",
        "targets": ["Attention"],
        # The threshold is a * exp(b * target) / n: a / n at a target of 0. Readers want b above 0, and leave a phase
        # without numbers dense.
        "threshold_scale_factor": {
            "formula": "a * exp(b * target_sparsity)",
            "decode": {"a": float(selector.scale), "b": 1.0},
        },
        "target_sparsity": {"decode": 0.0},
        "ignore": [f"layers.{layer}.self_attn" for layer in single.dense],
    }
    config = {"config_groups": {"group_0": group}, "producer": {"name": "sparseattn", "version": __version__}}
    if not selector.scale > 0:
        raise NoExportError(f"{project} takes a threshold above 0, and {selector.label()} skips nothing")
    differs = [*_zones(plan, project), _every_tile(single)]
    return Exported({"sparse_attention_config": config}, tuple(filter(None, differs)))


def sglang(plan: Plan) -> Exported:
    """SGLang: nothing that a plan says has the same meaning there."""
    single = _single(plan, "SGLang")
    raise _unlike(
        "SGLang",
        single,
        "its HiSparse follows a model's own index (DSA), and its double sparsity takes channels for each query head "
        "from a file of its own, where doublesparsity has one list for a KV head",
    )


def ucm(plan: Plan) -> Exported:
    """Unified Cache Manager: nothing that a plan says has the same meaning there."""
    single = _single(plan, "Unified Cache Manager")
    raise _unlike(
        "Unified Cache Manager",
        single,
        "its GSAOnDevice ranks whole blocks by the hash codes of their rows, and its ESA scores blocks for all heads "
        "together and anew only every few steps",
    )


FORMATS: dict[str, Callable[[Plan], Exported]] = {"trtllm": trtllm, "modelopt": modelopt, "sglang": sglang, "ucm": ucm}
