# SPDX-License-Identifier: Apache-2.0
"""The ctypes structs have the layout that a C compiler gives the headers: size, and offset and size of every field."""

import ctypes
import os
import shutil
import subprocess
import tempfile
import unittest

from anchorkv import _ffi

INCLUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "include")
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
}


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
            '#include "anchorkv/akv_experimental.h"\n#include "anchorkv/akv_document.h"\nint main(void)\n{\n'
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


if __name__ == "__main__":
    unittest.main()
