/* The CPU kernels of onepass, called by pointers from native.py. Equations cite docs/theory.md. */
#include "rows_backward.h"
#include "tiles_backward.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT void onepass_threads(Parallel parallel) { openmp = parallel; }

/* Statistics and y; without y, the statistics alone. Returns 0, or 1 where memory is short. */
EXPORT int onepass_forward(const Problem *p, const Tensors *t, int64_t threads) {
    Tensors with = *t;
    int64_t sets = p->outer * p->sets;
    float *memory = malloc((size_t)sets * 8);
    if (!memory) return 1;
    if (!with.mean) with.mean = memory, memset(memory, 0, (size_t)sets * 4);
    if (!with.rstd) with.rstd = memory + sets;
    if (p->given) for (int64_t set = 0; set < sets; set++) with.rstd[set] = (float)(1.0 / sqrt(with.var[set] + p->eps));
    int failed = p->tile ? tiles_forward(p, &with, threads) : rows_forward(p, &with, threads);
    free(memory);
    return failed;
}

/* The gradients that have a place in t. c1 and c2 are computed and kept where there is one; with dx alone wanted and `sums` 0, they are given. */
EXPORT int onepass_backward(const Problem *p, const Tensors *t, int64_t threads, int64_t sums) {
    Tensors with = *t;
    int64_t sets = p->outer * p->sets;
    float *memory = malloc((size_t)sets * 8);
    if (!memory) return 1;
    if (!with.c1) with.c1 = memory, with.c2 = memory + sets;
    int failed = p->tile ? tiles_backward(p, &with, threads, (int)sums) : rows_backward(p, &with, threads, (int)sums);
    free(memory);
    return failed;
}
