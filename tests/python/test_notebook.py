"""The notebook: what its cells name and import, and that they run, with small shapes on the CPU. No test
checks a time."""

import ast
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
from gander_bench import records, report
from gander_bench.stored import stored

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
RESULTS = ROOT / "bench" / "results"
TRAINING = ("h100-61fd4b1-train.jsonl", "h200-5bb0dad-train.jsonl")


def committed():
    return nbformat.read(NOTEBOOK, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell):
    """What a cell has printed and shown, without pictures."""
    shown = [output.get("text") or output["data"].get("text/markdown", "") for output in cell.outputs]
    return "\n".join(shown)


def pictures(cell):
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def under(notebook, heading):
    """The cells of code below a heading, up to the next one."""
    cells, found = notebook.cells, []
    at = next(i for i, cell in enumerate(cells) if re.match(rf"#+ {re.escape(heading)}", cell.source))
    for cell in cells[at + 1 :]:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            break
        if cell.cell_type == "code":
            found.append(cell)
    return found


# ---- What the cells name ----


def private_names(source):
    """Modules and names with a leading underscore that a cell imports or takes from an object."""
    tree = ast.parse(re.sub(r"^%.*", "", source, flags=re.M))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        else:
            continue
        found += [name for name in names if any(part.startswith("_") for part in name.split("."))]
    return found


def test_the_cells_use_nothing_private():
    for source in (
        "import gander._native",
        "from gander._table import a",
        "from torch._inductor.utils import run_and_get_code",
        "from gander_bench.plots import (a, _lines)",
        "%matplotlib inline\nx = plots._lines",
    ):
        assert private_names(source), source
    assert private_names("from gander_bench import plots\nfor _ in plots.a: pass") == []
    for cell in code(committed()):
        assert private_names(cell.source) == []


def imported(notebook):
    """The names that the cells import from gander_bench: (module, name)."""
    for cell in code(notebook):
        for node in ast.walk(ast.parse(re.sub(r"^%.*", "", cell.source, flags=re.M))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("gander_bench"):
                yield from ((node.module, alias.name) for alias in node.names)


def test_what_the_cells_import_is_there():
    found = list(imported(committed()))
    assert len(found) > 5
    for module, name in found:
        if module == "gander_bench.triton_loads":
            pytest.importorskip("triton", reason="this environment has no Triton")
        owner = importlib.import_module(module)
        assert hasattr(owner, name) or importlib.import_module(f"{module}.{name}")


def test_the_files_that_the_cells_name_exist():
    """No cell chooses a file by its date: each of them is named."""
    source = "\n".join(cell.source for cell in code(committed()))
    named = re.findall(r'RESULTS / "([^"]*)"', source)
    assert len(named) > 8 and set(TRAINING) < set(named)
    assert [name for name in named if not (RESULTS / name).is_file()] == []
    assert "glob" not in source


# ---- Measurements by name ----


def training(path, *contestants):
    point = {"section": "train", "model": "small", "dtype": "bfloat16", "batch": 8, "sequence": 2048}
    point |= {"steps": 2, "seed": 0, "on": "cuda"}
    ran = dict(ms=1.0, tokens_per_second=1.0, first_step_s=1.0, parameters=1, losses=[3.0, 2.0])
    store = records.Store(path, resume=False)
    for name, figures in contestants:
        store.add(point | {"contestant": name}, {"results": {name: ran if figures is None else figures}}, {})
    return path


def test_a_missing_contestant_is_an_error(tmp_path):
    path = training(tmp_path / "a.jsonl", ("gander", None), ("liger", {"error": "no room"}))
    assert len(stored(path, "train", ["gander"], model="small")) == 2
    for lacking in ("torch", "liger"):  # a contestant that failed has no figures either
        with pytest.raises(LookupError, match=rf"a\.jsonl lacks {lacking} in section 'train'.* has gander:"):
            stored(path, "train", ["gander", lacking])
    with pytest.raises(LookupError, match=r"a\.jsonl has no section 'train', model 'medium'"):
        stored(path, "train", ["gander"], model="medium")
    with pytest.raises(LookupError, match=r"there is no file .*b\.jsonl"):
        stored(tmp_path / "b.jsonl", "train", ["gander"])


def execute(notebook, folder, **environment):
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_WAIT_POLICY": "passive",
        "IPYTHONDIR": str(folder),
        "JUPYTER_CONFIG_DIR": str(folder),
    } | environment
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client = nbclient.NotebookClient(
            notebook,
            timeout=1000,  # of a cell
            kernel_name="python3",
            resources={"metadata": {"path": str(NOTEBOOK.parent)}},
        )
        return client.execute(env=os.environ.copy())


def test_the_training_cell_fails_without_torch(tmp_path):
    """Regression test: the cell took the newest file, which had no torch in it, and showed no headline."""
    path = training(tmp_path / "new-train.jsonl", ("torch.compile", None), ("gander.compile", None))
    notebook = committed()
    (cell,) = (cell for cell in code(notebook) if "h100 = stored(" in cell.source)
    notebook.cells = [code(notebook)[0], cell]
    assert cell.source.count(TRAINING[0]) == 1
    cell.source = cell.source.replace(f'RESULTS / "{TRAINING[0]}"', repr(str(path)))
    with pytest.raises(
        nbclient.exceptions.CellExecutionError, match=r"new-train\.jsonl lacks torch, gander,"
    ):
        execute(notebook, tmp_path)


# ---- The committed outputs ----


def test_the_committed_training_is_that_of_the_files():
    cells = under(committed(), "A whole model")
    shown = "\n".join(map(said, cells))
    assert len(cells) == 3
    for name in TRAINING:
        for table in report.train_tables(report.latest(records.read(RESULTS / name))):
            assert table.markdown() in shown


def test_the_committed_notebook_is_executed():
    cells = code(committed())
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells)
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)


# ---- A run ----


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The notebook with the outputs of a run."""
    return execute(committed(), tmp_path_factory.mktemp("notebook"), GANDER_NOTEBOOK_SMALL="1")


def rows_of(cell):
    """The rows of the Markdown tables that a cell shows, without their heads."""
    rows = [
        [value.strip() for value in line.strip("|").split("|")]
        for line in said(cell).splitlines()
        if line.startswith("|")
    ]
    return [
        row for row, after in zip(rows, [*rows[1:], ["x"]], strict=True) if "---" not in row[0] + after[0]
    ]


def test_every_cell_shows_something(ran):
    assert [cell.source for cell in code(ran) if not cell.outputs] == []


def test_throughput_of_a_cpu(ran):
    (cell,) = under(ran, "Throughput, measured here")
    assert pictures(cell) == 1
    assert [row[0] for row in rows_of(cell)] == ["softmax forward", "RMSNorm backward (dx, dw)"]
    assert all(float(figure) > 0 for row in rows_of(cell) for figure in row[1:])


def test_a_stored_cpu_is_drawn(ran):
    (cell,) = under(ran, "Throughput on a CPU")
    assert pictures(cell) == 1 and "plots.cpu(" in cell.source


def test_numerics(ran):
    (cell,) = under(ran, "Numerics")
    assert len(rows_of(cell)) == 2
    assert all(float(off) < 1e-2 for row in rows_of(cell) for off in row[1:])


def test_gpus_are_shown_on_any_machine(ran):
    (cell,) = under(ran, "Throughput on an H100")
    assert pictures(cell) == 1 and len(rows_of(cell)) == 6
    assert "| operator | torch | quack | liger | cudnn | torch.compile |" in said(cell)
    drawn, shown = under(ran, "On an H200")
    assert pictures(drawn) == 2
    assert "torch.compile" in said(shown) and "three matmuls alone" in said(shown)


def test_losses_are_differences(ran):
    (cell,) = under(ran, "Is it the same model?")
    assert pictures(cell) == 1
    torchs, *others = rows_of(cell)
    assert torchs[0] == "torch: its loss" and len(others) == 9
    for name, *figures in others:
        assert all(re.fullmatch(r"[+-]0\.\d{4}", figure) for figure in figures[:-1]), name
        assert 0 < float(figures[-1]) < 0.1, name


def test_costs_over_vocabulary_and_tokens(ran):
    (over_classes,) = under(ran, "Cross-entropy: time and memory")
    (over_tokens,) = under(ran, "... and over the length of the sequence")
    assert pictures(over_classes) == pictures(over_tokens) == 1


def test_statistics_of_tokens(ran):
    (cell,) = under(ran, "After pre-training")
    assert pictures(cell) == 1 and "trl is left out: " in said(cell)


def test_programs_of_jax(ran):
    """Measured where jax is installed; elsewhere the cell says what is missing."""
    (cell,) = under(ran, "Inside jax.jit")
    if importlib.util.find_spec("jaxlib") is None:  # tests/jax is on the path
        assert said(cell).startswith("Nothing is measured here: gander.jax needs jax, which is not installed")
        return
    programs = ["softmax forward", "RMSNorm forward", "cross-entropy mean + gradient"]
    assert [row[0] for row in rows_of(cell)] == programs
    assert all(float(time) > 0 for row in rows_of(cell) for time in row[2:4])


def test_the_dip(ran):
    bars, loads, explained = under(ran, "The dip at N = 50257")
    assert pictures(bars) == 1
    assert "[0, 2, 4, 6, 8, 10, 12, 14, 0] | [0, 0, 0, 0, 0, 0, 0, 0, 0]" in said(loads)
    assert "quack, loss + gradient of 8192 rows, H200, us | refused | 509" in said(loads)
    assert said(explained).count("same_offset") == 2


def test_recompilations(ran):
    (cell,) = under(ran, "Recompilations")
    shown = said(cell)
    assert "| default | 2 | 0 |" in shown and "| marked dynamic | 1 | 0 |" in shown
    assert "| dynamic=False | 8 | 4 |" in shown  # recompile_limit is 8


def test_the_generated_kernel(ran):
    (cell,) = under(ran, "What torch.compile's kernel does differently")
    assert "| 64 x 1000 |" in said(cell) and "loadu(in_ptr0" in said(cell)
    assert "import torch" not in said(cell)  # the kernel alone


def test_outputs_have_no_paths(ran):
    for notebook in (ran, committed()):
        assert str(ROOT) not in json.dumps([cell.outputs for cell in code(notebook)])
