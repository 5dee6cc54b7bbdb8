"""AOTInductor: exported and packaged programs call operators of which some results are not asked for."""

import gander  # noqa: F401 - registers the operators
import pytest
import torch

ops = torch.ops.gander
GIVEN = {
    "rmsnorm_bwd": ("x", "weight", "dout", "dresidual_out", "rstd"),
    "layernorm_bwd": ("x", "weight", "dout", "dresidual_out", "mean", "rstd"),
}


class Gradients(torch.nn.Module):
    """Returns all results, so that the program also holds those that are not asked for."""

    def forward(self, given):
        options = {"residual_dtype": torch.half, "bias_dtype": torch.bfloat16, "needs_dw": True}
        return [
            getattr(ops, name)(*(given[argument] for argument in arguments), **options)
            for name, arguments in GIVEN.items()
        ]


def package_of(model, given, folder):
    """Compiles a model's program for arguments like these, and returns the path of its package."""
    return torch._inductor.aoti_compile_and_package(
        torch.export.export(model, given),
        package_path=str(folder / "program.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # C++ that calls operators
    )


def test_gradients_of_norms(tmp_path):
    given = {
        "x": torch.randn(4, 33),
        "weight": torch.randn(33),
        "dout": torch.randn(4, 33).half(),
        "dresidual_out": torch.randn(4, 33),
        "mean": torch.randn(4),
        "rstd": torch.rand(4) + 0.5,
    }
    model = Gradients()
    if torch.__version__ < "2.11":
        with pytest.raises(
            Exception, match="residual_dtype is float16, expected None, because AOTInductor of"
        ):
            package_of(model, (given,), tmp_path)
        return
    program = torch._inductor.aoti_load_package(package_of(model, (given,), tmp_path))
    for got, want in zip(program(given), model(given), strict=True):
        assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want]
        dx, dresidual, dw, db = got
        assert dresidual.shape == db.shape == (0,)
        assert torch.equal(dx, want[0]) and torch.equal(dw, want[2])
        assert dx.any() and dw.any()
