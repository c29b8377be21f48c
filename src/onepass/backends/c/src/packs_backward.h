/* The row walk for short sets, backward: the sums and dx of each pack. */
#pragma once
#include "packs.h"
#include "rows_backward.h"

/* The rows that the sums a and b contain: how many, and the last one's sample. */
typedef struct { int64_t o, rows; } SummedRows;

static void packs_flush_sums(const PackJob *packs, const Partials *partials, PackBuffers *buffers, SummedRows *summed) {
    if (summed->rows) {
        partials_add_columns(partials, packs->problem, packs->tensors, summed->o, 0, 0, packs->problem->run, buffers->a, buffers->b);
        fill(buffers->a, 0.0f, packs->problem->run), fill(buffers->b, 0.0f, packs->problem->run);
    }
    summed->rows = 0;
}

static int same_sample_parameters(const ParamMap *map, int64_t o, int64_t other) { return map_base(map, o, 0) == map_base(map, other, 0); }

static void packs_backward_task(void *job, int64_t part, void *scratch) {
    const PackJob *packs = job;
    const Problem *problem = packs->problem;
    const Tensors *tensors = packs->tensors;
    PackBuffers *buffers = scratch;
    const Partials *partials = packs->with_sums && any_parameter_gradient(tensors) ? packs->partials + part : NULL;
    SummedRows summed = {0, 0};
    int64_t all_rows = problem->outer * problem->sets, end = all_rows * (part + 1) / packs->parts;
    affine_cache_clear(&buffers->affine);
    fill(buffers->a, 0.0f, problem->run), fill(buffers->b, 0.0f, problem->run);
    for (int64_t row = all_rows * part / packs->parts; row < end;) {
        Pack pack = pack_at(problem, row, end);
        int64_t n = pack.rows * problem->run, row_stride = pack.row_stride, type = is_direct(problem, tensors) ? problem->type : F32;
        const AffineSlot *slot = affine_cache_get(&buffers->affine, problem, tensors, pack.o, 0, 0, problem->run);
        const void *x = element_at(tensors->x, pack.x_start, problem->type), *dz = element_at(tensors->dy, pack.dense_start, problem->type);
        const float *mean = tensors->mean ? tensors->mean + row : buffers->mean, *rstd = tensors->rstd + row;
        float *c1 = tensors->c1 + row, *c2 = tensors->c2 + row;
        if (!tensors->mean || problem->from_y) fill(buffers->mean, 0.0f, pack.rows), mean = buffers->mean;
        if (type != problem->type)
            x = pack_as_floats(x, 0, problem, &pack, &row_stride, problem->type, buffers->x),
                dz = floats_at(dz, 0, n, problem->type, buffers->dy);
        if (problem->from_y) {
            for (int64_t k = 0; k < pack.rows; k++)
                x_hat_from_y(buffers->other + k * problem->run, (const float *)x + k * row_stride, slot->gain, slot->term, problem->run);
            fill(buffers->rstd, 1.0f, pack.rows), rstd = buffers->rstd;
            x = buffers->other, row_stride = problem->run;
        }
        if (problem->activation) {
            for (int64_t k = 0; k < pack.rows; k++)
                activation_backward(buffers->dz + k * problem->run, (const float *)dz + k * problem->run, (const float *)x + k * row_stride,
                                    mean[k], rstd[k], slot->gain, slot->term, problem->run, problem->activation);
            dz = buffers->dz;
        }
        if (packs->with_sums) {
            loops_for[type].gradient_sums(c1, c2, x, row_stride, mean, rstd, dz, slot->gain, pack.rows, problem->run);
            /* Not a multiplication by 0, which would keep NaN. */
            if (problem->given_statistics || !problem->centered) fill(c1, 0.0f, pack.rows);
            else multiply_by_scalar(c1, 1.0f / (float)problem->run, pack.rows);
            if (problem->given_statistics) fill(c2, 0.0f, pack.rows);
            else multiply_by_scalar(c2, 1.0f / (float)problem->run, pack.rows);
        }
        if (partials) {
            if (summed.rows >= ROWS_PER_FLUSH ||
                (summed.rows && (!same_sample_parameters(&problem->param_map, pack.o, summed.o) ||
                                 !same_sample_parameters(&problem->modulation_map, pack.o, summed.o))))
                packs_flush_sums(packs, partials, buffers, &summed);
            summed.o = pack.o, summed.rows += pack.rows;
        }
        void *out = type == problem->type   ? mutable_element_at(tensors->dx, pack.dense_start, type)
                    : x == buffers->x ? buffers->other
                                      : buffers->x;
        /* A long row goes in blocks, so that dx finds in the cache what the sums have read. */
        int64_t block = pack.rows == 1 ? BLOCK : problem->run;
        if (problem->given_statistics) fill(buffers->zeros, 0.0f, pack.rows);
        for (int64_t i = 0; i < problem->run; i += block) {
            int64_t length = min(block, problem->run - i);
            const void *x_block = element_at(x, i, type), *dz_block = element_at(dz, i, type);
            void *to = mutable_element_at(out, i, type);
            const float *gain = slot->gain + i, *dx_rstds = tensors->rstd + row;
            if (partials) loops_for[type].add_products(buffers->a + i, buffers->b + i, x_block, row_stride, mean, rstd, dz_block,
                                                       pack.rows, length);
            if (!tensors->dx) continue;
            /* (9): dx does not use x_hat, which may be NaN. */
            if (problem->given_statistics)
                loops_for[type].dx_rows(to, zero_block, 0, buffers->zeros, buffers->zeros, dx_rstds, dz_block, gain, c1, c2, pack.rows,
                                        length);
            else loops_for[type].dx_rows(to, x_block, row_stride, mean, rstd, dx_rstds, dz_block, gain, c1, c2, pack.rows, length);
        }
        if (tensors->dx && tensors->dsum)
            add_to(out, floats_at(tensors->dsum, pack.dense_start, n, problem->type, dz == buffers->dz ? buffers->dy : buffers->dz), n);
        if (tensors->dx && type != problem->type) store_floats(tensors->dx, pack.dense_start, out, n, problem->type);
        row += pack.rows;
    }
    if (partials) packs_flush_sums(packs, partials, buffers, &summed);
}

static int packs_backward(const Problem *problem, const Tensors *tensors, int64_t threads, int with_sums) {
    int64_t all_rows = problem->outer * problem->sets, scratch = aligned_size(sizeof(PackBuffers)), bytes = 0, partials_offset[MAX_PARTS];
    PackJob packs = {.problem = problem, .tensors = tensors, .with_sums = with_sums, .parts = min(all_rows, part_count(problem, tensors))};
    Partials partials[MAX_PARTS];
    for (int64_t part = 0; part < packs.parts; part++) {
        partials_offset[part] = bytes;
        bytes += partials_plan(partials + part, problem, tensors, all_rows * part / packs.parts / problem->sets,
                               (all_rows * (part + 1) / packs.parts - 1) / problem->sets + 1);
    }
    char *memory = allocate_buffer(threads * scratch + bytes);
    if (!memory) return 1;
    for (int64_t part = 0; part < packs.parts; part++)
        partials_clear(partials + part, tensors, (double *)(memory + threads * scratch + partials_offset[part]));
    packs.partials = partials;
    run_parallel(packs_backward_task, &packs, packs.parts, threads, memory, scratch);
    if (with_sums) partials_reduce(problem, tensors, partials, packs.parts, threads);
    release_buffer(memory);
    return 0;
}
