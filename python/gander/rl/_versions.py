"""Which versions of other packages gander.rl was checked with, and what it knows of their source."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
from typing import Any

# `./build.sh test hf` runs them: requirements-hf.txt locks TRL, requirements-rl.txt the others, and tests/hf
# compares.
CHECKED = {"trl": "1.16.0", "verl": "0.9.1", "openrlhf": "0.11.2"}

# What stands for a function computes what the function does, so it has to be the one that was read. Another
# version is served too, if it has the same. `digest` of a module, or of functions where it has others too.
SOURCES = {
    "trl.kernels.chunked_logprob": "839b28adba1daf35",
    "trl.kernels.logprob_entropy": "25e973c11f7dedb1",
    "verl.utils.experimental.torch_functional": "812d6db39676454f",
    "verl.utils.kernel.linear_cross_entropy": "b608f75336e18fae",
    "verl.utils.torch_functional.logprobs_from_logits": "dffd21fe40eb806b",
    "verl.utils.torch_functional.logprobs_from_logits_flash_attn": "5eb55276412cb463",
    "verl.utils.torch_functional.logprobs_from_logits_v2": "1074be97faf338ae",
    "verl.utils.torch_functional.entropy_from_logits": "f69d6578eeb3b2e4",
    "verl.utils.torch_functional.entropy_from_logits_with_chunking": "bde1bbefafdf7c31",
    "openrlhf.models.utils.log_probs_from_logits": "92a21e3351d3ab12",
    "openrlhf.models.utils.compute_entropy": "07f5fe4f771b1ca3",
}


def digest(found: Any) -> str:
    """Of the source of a module, class or function."""
    return hashlib.sha256(inspect.getsource(found).encode()).hexdigest()[:16]


def find(module: str) -> Any:
    """A module of another package. Refuses, in words, one that is not the one that was read."""
    package = module.partition(".")[0]
    how = f"pip install {package}=={CHECKED[package]}"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"gander.rl.{package} needs {package}, which is not installed: {how}") from None
    advice = f"gander.rl was checked with {package} {CHECKED[package]}: {how}, or a newer gander-kernels"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a package that this one needs
        raise NotImplementedError(f"{package} {version} has no {module}; {advice}") from None
    for path, expected in SOURCES.items():
        if path != module and path.rpartition(".")[0] != module:
            continue
        try:
            known = digest(found if path == module else getattr(found, path.rpartition(".")[2])) == expected
        except AttributeError:
            raise NotImplementedError(f"{package} {version} has no {path}; {advice}") from None
        except (OSError, TypeError):  # it is compiled, or not a function
            known = False
        if not known:
            raise NotImplementedError(
                f"{path} of {package} {version} has another source than that of {CHECKED[package]}; {advice}"
            )
    return found
