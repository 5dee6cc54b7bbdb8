"""The Python snippets of the pages that need transformers."""

import inspect
import re
import sys
from pathlib import Path

import gander.hf
import gander.rl
import models
import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))
from pages import NEED_HF, name_of, run, snippets


@pytest.mark.parametrize("page", NEED_HF, ids=name_of)
def test_page(page, capsys, monkeypatch):
    torch.manual_seed(0)

    def from_pretrained(name):  # a model that would have to be downloaded
        assert "/" in name
        return models.model("Llama")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    if page.name == "post-training.md" and sys.version_info < (3, 11):
        pytest.skip("gander.rl needs TRL 1.16, which is for Python 3.11 and newer")
    for name in "verl", "openrlhf":  # which are not installed
        monkeypatch.setattr(gander.rl, name, lambda: None)
    run(page, "cpu", with_hf=True)
    printed = capsys.readouterr().out
    for _, _, text in snippets(page, "text"):  # what a snippet before it prints
        for line in text.splitlines():
            assert line.removesuffix("...").rstrip() in printed


@pytest.mark.parametrize("name", [name for name in gander.hf.__all__ if name != "CHECKED"])
def test_documentation_names_every_argument(name):
    item = getattr(gander.hf, name)
    arguments = inspect.getdoc(item).partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", arguments, re.MULTILINE) == [*inspect.signature(item).parameters]
