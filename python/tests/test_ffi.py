# SPDX-License-Identifier: Apache-2.0
"""The ctypes structs have the layout that a C compiler gives the headers: size, and offset and size of every field; and
a library with another layout is refused when it is loaded.

_ffi.py is read by itself, without the package around it, so that these tests run where numpy is missing.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
INCLUDE = os.path.join(HERE, "..", "..", "include")
installed = importlib.util.find_spec("anchorkv")
folder = installed.submodule_search_locations[0] if installed else os.path.join(HERE, "..", "anchorkv")
alone = types.ModuleType("anchorkv_alone")
alone.__path__ = [folder]
sys.modules["anchorkv_alone"] = alone
_ffi = importlib.import_module("anchorkv_alone._ffi")
_ffi_cuda = importlib.import_module("anchorkv_alone._ffi_cuda")

STRUCTS = {
    "akv_diag": _ffi.Diag,
    "akv_tensor": _ffi.Tensor,
    "akv_rope": _ffi.Rope,
    "akv_experiment": _ffi.Experiment,
    "akv_config": _ffi.Config,
    "akv_shape": _ffi.Shape,
    "akv_bytes": _ffi.Bytes,
    "akv_layer": _ffi.Layer,
    "akv_segment_info": _ffi.SegmentInfo,
    "akv_plan_info": _ffi.PlanInfo,
    "akv_attend_params": _ffi.AttendParams,
    "akv_document_model": _ffi.DocumentModel,
    "akv_document_layer": _ffi.DocumentLayer,
    "akv_document_property": _ffi.DocumentProperty,
    "akv_document_parts": _ffi.DocumentParts,
    "akv_cuda_sequence": _ffi_cuda.Sequence,
    "akv_cuda_batch": _ffi_cuda.Batch,
    "akv_cuda_step": _ffi_cuda.Step,
    "akv_cuda_token": _ffi_cuda.Token,
}
STAMPED = {**_ffi.STAMPED, **_ffi_cuda.STAMPED}


class LayoutTest(unittest.TestCase):
    @unittest.skipUnless(shutil.which(os.environ.get("CC", "cc")), "no C compiler")
    def test_layout(self):
        lines, expected = [], []
        for name, struct in STRUCTS.items():
            lines.append(f'    printf("{name} %zu\\n", sizeof({name}));')
            expected.append(f"{name} {ctypes.sizeof(struct)}")
            for field, _ in struct._fields_:
                lines.append(
                    f'    printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                    f"sizeof((({name} *)0)->{field}));"
                )
                at = getattr(struct, field)
                expected.append(f"{name}.{field} {at.offset} {at.size}")
        source = (
            "#include <stdio.h>\n#include <stddef.h>\n"
            '#include "anchorkv/akv_experimental.h"\n#include "anchorkv/akv_document.h"\n'
            '#include "anchorkv/akv_cuda.h"\nint main(void)\n{\n'
            + "\n".join(lines)
            + "\n    return 0;\n}\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "layout.c")
            with open(path, "w") as f:
                f.write(source)
            subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-I", INCLUDE, path, "-o", path[:-2]], check=True)
            printed = subprocess.run([path[:-2]], check=True, capture_output=True, text=True).stdout.split("\n")[:-1]
        self.assertEqual(printed, expected)

    def test_every_stamped_struct_is_checked(self):
        """What has an _init in a header whose structs are used here has its size compared at loading."""
        headers = ""
        for name in ("anchorkv.h", "akv_experimental.h", "akv_document.h", "akv_cuda.h"):
            with open(os.path.join(INCLUDE, "anchorkv", name)) as f:
                headers += f.read()
        inits = set(re.findall(r"AKV_API void (akv_\w+_init)\(", headers))
        used = {f"{name}_init" for name, struct in STRUCTS.items() if struct._fields_[0][0] == "struct_size"}
        self.assertEqual(used & inits, set(STAMPED))
        for init, struct in STAMPED.items():
            self.assertIs(STRUCTS[init[:-5]], struct)
            self.assertLess(2 * ctypes.sizeof(struct), _ffi.ROOM)

    def test_other_layouts_are_refused(self):
        path = _ffi.library_path()
        lib = _ffi.load()

        class Shorter(ctypes.Structure):
            _fields_ = _ffi.Config._fields_[:-1]

        class Longer(ctypes.Structure):
            _fields_ = _ffi.Layer._fields_ + [("more", ctypes.c_double)]

        changed = {**_ffi.STAMPED, "akv_config_init": Shorter, "akv_layer_init": Longer}
        with self.assertRaises(ImportError) as caught:
            _ffi.check_layout(lib, path, changed)
        for words in (
            f"akv_config has {ctypes.sizeof(_ffi.Config)} bytes there and {ctypes.sizeof(Shorter)} here",
            f"akv_layer has {ctypes.sizeof(_ffi.Layer)} bytes there and {ctypes.sizeof(Longer)} here",
            path,
            "Install the package again",
        ):
            self.assertIn(words, str(caught.exception))
        self.assertNotIn("akv_shape", str(caught.exception))

    @unittest.skipUnless(shutil.which(os.environ.get("CC", "cc")), "no C compiler")
    def test_library_that_has_grown(self):
        """A library whose akv_config is larger, and one that lacks a function, in processes of their own."""
        lines = ["#include <stddef.h>", '#define GROW(name, size) void name(void *p) { *(size_t *)p = size; }']
        for init, struct in _ffi.STAMPED.items():
            size = ctypes.sizeof(struct) + (8 if init == "akv_config_init" else 0)
            lines.append(f"GROW({init}, {size})")
        load = (
            "import importlib.util as u; s = u.spec_from_file_location('f', %r); m = u.module_from_spec(s); "
            "s.loader.exec_module(m); m.load()" % _ffi.__file__
        )
        for body, words in (
            ("\n".join(lines), "does not belong to this Python package: akv_config has"),
            ("int nothing;", "it has no function akv_"),
        ):
            with tempfile.TemporaryDirectory() as work:
                source, library = os.path.join(work, "other.c"), os.path.join(work, "libother.so")
                with open(source, "w") as f:
                    f.write(body + "\n")
                subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", source, "-o", library], check=True)
                env = {**os.environ, "AKV_LIBRARY": library}
                run = subprocess.run([sys.executable, "-c", load], env=env, capture_output=True, text=True)
            self.assertNotEqual(run.returncode, 0)
            self.assertIn("ImportError", run.stderr)
            self.assertIn(words, run.stderr)


if __name__ == "__main__":
    unittest.main()
