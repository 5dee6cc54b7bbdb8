"""The handlers: their declarations of XLA's API, and what they refuse."""

import re
import shutil
import subprocess
from pathlib import Path

import gander.jax as gj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gander._table import OPERATORS
from gander.jax import _versions
from gander.jax._library import target

ROOT = Path(__file__).resolve().parents[2]
STRUCTS = {
    "Extension": "Extension_Base",
    "ApiVersion": "Api_Version",
    "Buffer": "Buffer",
    "Span": "ByteSpan",
    "Scalar": "Scalar",
    "Buffers": "Args",
    "Attributes": "Attrs",
    "ErrorCreate": "Error_Create_Args",
    "ErrorDestroy": "Error_Destroy_Args",
    "StreamGet": "Stream_Get_Args",
    "MemoryAllocate": "DeviceMemory_Allocate_Args",
    "MemoryFree": "DeviceMemory_Free_Args",
    "OrdinalGet": "DeviceOrdinal_Get_Args",
    "MetadataExtension": "Metadata_Extension",
}
FIELDS = {  # of structs that are declared up to the last field that is used
    "Metadata.traits": "Metadata.traits",
    "Metadata.version": "Metadata.api_version",
    "Frame.api": "CallFrame.api",
    "Frame.context": "CallFrame.ctx",
    "Frame.stage": "CallFrame.stage",
    "Frame.arguments": "CallFrame.args",
    "Frame.results": "CallFrame.rets",
    "Frame.attributes": "CallFrame.attrs",
    "MetadataExtension.metadata": "Metadata_Extension.metadata",
    "Buffer.data": "Buffer.data",
    "Buffer.dims": "Buffer.dims",
    "Buffers.buffers": "Args.args",
    "Attributes.names": "Attrs.names",
    "Attributes.values": "Attrs.attrs",
    "ErrorCreate.code": "Error_Create_Args.errc",
    "StreamGet.stream": "Stream_Get_Args.stream",
    "MemoryAllocate.data": "DeviceMemory_Allocate_Args.data",
    "MemoryFree.data": "DeviceMemory_Free_Args.data",
    "OrdinalGet.ordinal": "DeviceOrdinal_Get_Args.device_ordinal",
    "Api.error_create": "Api.XLA_FFI_Error_Create",
    "Api.error_destroy": "Api.XLA_FFI_Error_Destroy",
    "Api.stream_get": "Api.XLA_FFI_Stream_Get",
    "Api.memory_allocate": "Api.XLA_FFI_DeviceMemory_Allocate",
    "Api.memory_free": "Api.XLA_FFI_DeviceMemory_Free",
    "Api.ordinal_get": "Api.XLA_FFI_DeviceOrdinal_Get",
}
INTEGERS = [f"{kind}{bits}" for kind in "SU" for bits in (8, 16, 32, 64)]
KINDS = ["PRED", *INTEGERS, "F16", "F32", "F64", "BF16", "C64", "C128"]
CONSTANTS = {
    "METADATA": "Extension_Metadata",
    "BUFFER": "ArgType_BUFFER",
    "SCALAR": "AttrType_SCALAR",
    "TEXT": "AttrType_STRING",
    "EXECUTE": "ExecutionStage_EXECUTE",
    **{
        name: f"DataType_{name}"
        for name in [
            "PRED",
            "S8",
            "S16",
            "S32",
            "S64",
            "U8",
            "U16",
            "U32",
            "U64",
            "F16",
            "F32",
            "F64",
            "BF16",
            "C64",
            "C128",
        ]
    },
    **{
        name: f"Error_Code_{name}"
        for name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "INTERNAL")
    },
}


def test_declarations_are_those_of_jaxlib(tmp_path):
    """Sizes, places of fields and constants of xla.h beside jaxlib's header, by the C compiler."""
    header = jax.ffi.include_dir() + "/xla/ffi/api/c_api.h"
    lines = [
        '#include "xla.h"',
        f'#include "{header}"',
        '_Static_assert(XLA_MAJOR == XLA_FFI_API_MAJOR && XLA_MINOR <= XLA_FFI_API_MINOR, "version");',
    ]
    renamed = "XLA_FFI_InternalExtension" in Path(header).read_text()  # in jaxlib 0.11
    for ours, theirs in STRUCTS.items():
        theirs = "InternalExtension" if renamed and ours == "Extension" else theirs
        lines.append(f'_Static_assert(sizeof({ours}) == sizeof(XLA_FFI_{theirs}), "{ours}");')
    for ours, theirs in FIELDS.items():
        (a, field), (b, other) = ours.split("."), theirs.split(".")
        lines.append(f'_Static_assert(offsetof({a}, {field}) == offsetof(XLA_FFI_{b}, {other}), "{ours}");')
    for ours, theirs in CONSTANTS.items():
        lines.append(f'_Static_assert({ours} == XLA_FFI_{theirs}, "{ours}");')
    (tmp_path / "compare.c").write_text("\n".join(lines))
    folders = [f"-I{folder}" for folder in (ROOT / "python/gander/jax/c", jax.ffi.include_dir())]
    command = [shutil.which("gcc"), "-std=gnu11", "-fsyntax-only", *folders, tmp_path / "compare.c"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_operator_has_a_target():
    assert {check.is_custom_call() for check in gj.disabled_checks} == {target(name) for name in OPERATORS}


def call(operator, *arrays, results="y", **attributes):
    shape = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    function = jax.ffi.ffi_call(target(operator), [shape])
    return jax.jit(lambda *a: function(*a, results=results, **attributes))(*arrays)[0].block_until_ready()


def test_programs_of_other_versions():
    """What the table does not have is refused: it could change what is computed."""
    x = jnp.ones((2, 3))
    assert call("softmax_forward", x, arguments="x").shape == (2, 3)
    for words, given in (
        ("the arguments of this call are unknown", {"arguments": "input"}),
        ("the results of this call are unknown", {"arguments": "x", "results": "y z"}),
        ("does not name all of its arguments", {"arguments": ""}),
        ("the option temperature of this call is unknown", {"arguments": "x", "temperature": np.float64(2)}),
        ("the option algorithm of this call is unknown", {"arguments": "x", "algorithm": np.float64(2)}),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            call("softmax_forward", x, **given)


def test_words_of_the_library():
    """What only the library refuses comes as it says it, with XLA's code."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: softmax_forward: y has shape"):
        function = jax.ffi.ffi_call(target("softmax_forward"), [jax.ShapeDtypeStruct((4,), "float32")])
        jax.jit(lambda x: function(x, arguments="x", results="y"))(jnp.ones((2, 3)))[0].block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected float16, bfloat16"):
        call("softmax_forward", jnp.ones((2, 3), "int32"), arguments="x")


def test_versions(monkeypatch):
    oldest, newest = _versions.CHECKED
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'jax = ["jax>={oldest}"]' in pyproject
    # The one for Python 3.11 and the one for 3.12: `./build.sh test jax` runs both.
    assert re.findall(r"^jax==(\S+)", (ROOT / "requirements-jax.txt").read_text(), re.M) == [oldest, newest]
    for found, words in (
        ("0.4.38", f"jax is 0.4.38, expected {oldest} or newer"),
        (None, "is not installed"),
    ):

        def version(_, found=found):
            if found is None:
                raise _versions.importlib.metadata.PackageNotFoundError
            return found

        monkeypatch.setattr(_versions.importlib.metadata, "version", version)
        with pytest.raises(ImportError, match=words):
            _versions.require()
