"""A plain loop in C, compiled when it is asked for: what a CPU does without vectors of exponentials.

It goes through the channels one by one, time inside and states innermost, as ggml's `ssm_scan` does, and is compiled with
the flags that ggml is: for this machine, without relaxing the rules of arithmetic.
"""

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c11", "-shared", "-fPIC")
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
    found = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()[0]


def compiled() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "scan.c", Path(folder) / "scan.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [str(compiler()), *FLAGS, str(source), "-o", str(library), "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        return ctypes.CDLL(str(library))  # stays loaded when the file is gone
