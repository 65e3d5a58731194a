"""A plain loop in C, compiled when it is asked for: what a compiler makes of the recurrence.

It goes through the channels one by one, time inside and states innermost, as ggml's `ssm_scan` does. Compiled as ggml
is, for this machine and by the rules of arithmetic, it takes one exponential at a time. Where the rules are relaxed,
GCC with glibc takes a vector of them.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c11", "-shared", "-fPIC")
RELAXED = (*FLAGS, "-ffast-math")
SOURCE = r"""
#include <math.h>
#include <stdlib.h>

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* u, delta, z, y (b, d, l); A (d, n); B, C (b, n, l); D, bias (d). 1 where memory is short. */
int scan(const float *u, const float *delta, const float *A, const float *B, const float *C, const float *D,
         const float *z, const float *bias, float *y, long batch, long channels, long length, long states) {
    float *tokens = malloc(sizeof(float) * (2 * length * states + states));
    if (!tokens) return 1;
    float *b = tokens, *c = tokens + length * states, *h = tokens + 2 * length * states;
    for (long image = 0; image < batch; image++) {
        for (long n = 0; n < states; n++)
            for (long t = 0; t < length; t++) { /* states next to each other */
                b[t * states + n] = B[(image * states + n) * length + t];
                c[t * states + n] = C[(image * states + n) * length + t];
            }
        for (long d = 0; d < channels; d++) {
            const long row = (image * channels + d) * length;
            for (long n = 0; n < states; n++) h[n] = 0.0f;
            for (long t = 0; t < length; t++) {
                const float step = softplus(delta[row + t] + bias[d]), x = step * u[row + t];
                float sum = 0.0f;
                for (long n = 0; n < states; n++) {
                    const float state = h[n] * expf(step * A[d * states + n]) + x * b[t * states + n];
                    sum += state * c[t * states + n];
                    h[n] = state;
                }
                const float gate = z[row + t];
                y[row + t] = (sum + D[d] * u[row + t]) * gate / (1.0f + expf(-gate));
            }
        }
    }
    free(tokens);
    return 0;
}
"""


def compiler() -> str | None:
    return shutil.which("cc")


def version() -> str:
    found = subprocess.run([str(compiler()), "-dumpfullversion", "-dumpversion"], capture_output=True, text=True)
    return f"cc {found.stdout.strip() or 'of unknown version'}"


def compiled(flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "scan.c", Path(folder) / "scan.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [str(compiler()), *flags, str(source), "-o", str(library), "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        return ctypes.CDLL(str(library))  # stays loaded when the file is gone
