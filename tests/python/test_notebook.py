"""The notebook runs from its first cell to its last, with small shapes on the CPU. No test checks a time."""

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip(
    "nbformat", reason="requirements.txt has nbclient, another environment may not"
)
nbclient = pytest.importorskip(
    "nbclient", reason="requirements.txt has nbclient, another environment may not"
)

# Inductor's first compilation for a CPU alone takes a minute, and several where the cores are shared.
pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "compare_torch_compile.ipynb"


def said(cell):
    """What a cell has printed and shown, without pictures."""
    shown = [output.get("text") or output["data"].get("text/markdown", "") for output in cell.outputs]
    return "\n".join(shown)


def under(notebook, heading):
    """The outputs of the code below a heading."""
    cells = notebook.cells
    at = next(i for i, cell in enumerate(cells) if cell.source.startswith(f"## {heading}"))
    return said(cells[at + 1])


def results(folder):
    """A results file of `bench train` with a curve and a failure."""
    from gander_bench import records

    store = records.Store(folder / "a-train.jsonl", resume=False)
    point = {"section": "train", "model": "small", "dtype": "bfloat16", "batch": 8, "sequence": 2048}
    point |= {"steps": 2, "seed": 0, "on": "cuda"}
    figures = dict(ms=1.0, tokens_per_second=1.0, first_step_s=1.0, parameters=1, losses=[3.0, 2.0])
    store.add(point | {"contestant": "torch"}, {"results": {"torch": figures}}, {})
    store.add(point | {"contestant": "liger"}, {"results": {"liger": {"error": "no room"}}}, {})
    return store.path


# A tensor after a call of a function whose sizes are marked dynamic.
MARKED = """x = torch.ones(3)
marked_dynamic(torch.neg)(x)
print("marked:", hasattr(x, "_dynamo_dynamic_indices"))"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The notebook with the outputs of a run."""
    folder = tmp_path_factory.mktemp("notebook")
    environment = {
        "GANDER_NOTEBOOK_SMALL": "1",
        "GANDER_TRAIN_RESULTS": str(results(folder)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_WAIT_POLICY": "passive",
        "IPYTHONDIR": str(folder),
        "JUPYTER_CONFIG_DIR": str(folder),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(MARKED))
        client = nbclient.NotebookClient(
            notebook,
            timeout=1000,  # of a cell
            kernel_name="python3",
            resources={"metadata": {"path": str(NOTEBOOK.parent)}},
        )
        return client.execute(env=os.environ.copy())


def test_every_cell_shows_something(ran):
    quiet = [cell.source for cell in ran.cells if cell.cell_type == "code" and not cell.outputs]
    assert len(quiet) == 1 and quiet[0].startswith("def softmax")  # the cell of definitions


def test_numerics(ran):
    rows = [row.strip("| ").split(" | ") for row in under(ran, "Numerics").splitlines() if " | " in row][2:]
    assert len(rows) == 3 * 5
    for op, name, output, gradient in rows:
        assert float(output) < 1e-2 and float(gradient) < 1e-2, (op, name)


def test_one_way_does_not_compile_for_the_others(ran):
    """Regression test: marks stayed with the tensors, so all of torch.compile was measured for any shape."""
    assert "marked: False" in said(ran.cells[-1])


def test_recompilations(ran):
    shown = under(ran, "Recompilations")
    assert "| default | 2 | 0 |" in shown and "| marked dynamic | 1 | 0 |" in shown
    assert "| dynamic=False | 8 | 4 |" in shown  # recompile_limit is 8


def test_the_generated_kernel(ran):
    shown = under(ran, "What torch.compile's kernel does differently")
    assert "| 64 x 1000 |" in shown and "loadu(in_ptr0" in shown
    assert "import torch" not in shown  # the kernel alone


def test_results_of_training(ran):
    shown = under(ran, "A whole model")
    assert "Training small" in shown and "liger failed: no room." in shown
