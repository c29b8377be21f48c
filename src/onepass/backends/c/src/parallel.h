/* Threads and scratch memory.

   Tasks have numbers, and each free thread takes the next number. A task's result depends only on its number,
   so results do not depend on how many threads there are. */
#pragma once
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

/* GOMP_parallel of the OpenMP runtime that torch has loaded, so that torch and onepass share their threads.
   NULL means one thread. */
typedef void (*ParallelFunction)(void (*)(void *), void *, unsigned, unsigned);
static ParallelFunction openmp_parallel;

typedef void (*Task)(void *job, int64_t number, void *scratch);
typedef struct { Task task; void *job, *scratch; int64_t count, scratch_size; atomic_llong next, worker; } TaskLoop;

static void run_tasks(void *argument) {
    TaskLoop *loop = argument;
    void *scratch = (char *)loop->scratch + atomic_fetch_add(&loop->worker, 1) * loop->scratch_size;
    for (int64_t i; (i = atomic_fetch_add(&loop->next, 1)) < loop->count;) loop->task(loop->job, i, scratch);
}

/* Run tasks 0 to count - 1. `scratch` has `scratch_size` bytes for each thread.
   Always ask for all threads: with a smaller number the OpenMP runtime would end the other threads. */
static void run_parallel(Task task, void *job, int64_t count, int64_t threads, void *scratch, int64_t scratch_size) {
    TaskLoop loop = {task, job, scratch, count, scratch_size, 0, 0};
    if (threads > 1 && count > 1 && openmp_parallel) openmp_parallel(run_tasks, &loop, (unsigned)threads, 0);
    else run_tasks(&loop);
}

/* Round up to whole pairs of cache lines, so that vectors at the start of a buffer do not cross a line. */
static inline int64_t aligned_size(int64_t bytes) { return (bytes + 127) / 128 * 128; }

/* One buffer stays allocated for the next call, since new memory would cost as much as a small problem.
   A call that finds it in use allocates its own. */
typedef struct { int64_t size; } BufferHeader;
enum { HEADER_BYTES = 128, SPARE_BYTES = 4 << 20 }; /* a larger buffer is freed at once */
static _Atomic(BufferHeader *) spare_buffer;

static void *allocate_buffer(int64_t bytes) {
    BufferHeader *header = atomic_exchange(&spare_buffer, NULL);
    if (!header || header->size < bytes) {
        free(header);
        header = aligned_alloc(HEADER_BYTES, (size_t)(HEADER_BYTES + aligned_size(bytes)));
        if (!header) return NULL;
        header->size = bytes;
    }
    return (char *)header + HEADER_BYTES;
}

static void release_buffer(void *memory) {
    BufferHeader *header = memory ? (BufferHeader *)((char *)memory - HEADER_BYTES) : NULL;
    free(header && header->size <= SPARE_BYTES ? atomic_exchange(&spare_buffer, header) : header);
}
