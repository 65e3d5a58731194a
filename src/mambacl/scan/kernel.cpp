// Selective scan on the CPU: a plain shared library with a C interface, called through ctypes.
//
// It depends on neither Python's nor PyTorch's headers, so any C++11 compiler builds it and no version pins it. The body is
// compiled for several instruction sets, and the widest that the machine has is chosen at each call.

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#define RESTRICT __restrict__

namespace {

enum { TILE = 16, MOST_STATES = 256 };  // times between kept states; the largest number of states

// Everything one call needs. The channels of each tensor are contiguous: u, delta (b, l, d) with any strides of images and
// times; A (n, d); B, C (b, l, g, n); y, dy, du, ddelta (b, l, d); starts (b, tiles, n, d); last, dlast, dA (b, n, d).
template <typename T>
struct Problem {
    const T *u, *delta, *A, *B, *C, *dy, *dlast;
    T *y, *starts, *last, *du, *ddelta, *dA, *dB, *dC;
    long batch, length, channels, groups, states, tiles, chunks;
    long u_batch, u_time, delta_batch, delta_time;
};

// A chunk of the channels of one group of one image.
struct Item {
    long index, image, group, first, end;
};

}  // namespace

#if defined(__x86_64__) && defined(__clang__)
#define WIDE
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
namespace avx512 {
#include "kernel_types.h"
}
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
namespace avx2 {
#include "kernel_types.h"
}
#pragma clang attribute pop
#elif defined(__x86_64__) && defined(__GNUC__)
#define WIDE
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
namespace avx512 {
#include "kernel_types.h"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "kernel_types.h"
}
#pragma GCC pop_options
#endif
namespace plain {
#include "kernel_types.h"
}

namespace {

template <typename T>
struct Kernels {
    void (*forward)(const Problem<T>&, const Item&);
    void (*backward)(const Problem<T>&, const Item&, void*);
};

#define PICK(T, TYPE)                                                                                                    \
    Kernels<T> pick(const Problem<T>&) {                                                                                 \
        IF_WIDE(avx512, TYPE)                                                                                 \
        IF_WIDE(avx2, TYPE)                                                                                      \
        return {plain::TYPE::forward_item, plain::TYPE::backward_item};                                                  \
    }
#ifdef WIDE
#define HAS_avx512 \
    __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
#define HAS_avx2 __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
#define IF_WIDE(SET, TYPE) \
    if (HAS_##SET) return {SET::TYPE::forward_item, SET::TYPE::backward_item};
#else
#define IF_WIDE(SET, TYPE)
#endif
PICK(float, f32)
PICK(double, f64)

// Runs work(item) for each item on a few threads; the result of an item never depends on the thread that takes it.
// With OpenMP these are PyTorch's own threads, which would otherwise keep spinning beside ours.
template <typename Work>
void spread(long items, int threads, Work work) {
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long item = 0; item < items; ++item) work(item);
#else
    std::atomic<long> next(0);
    auto loop = [&] {
        for (long item = next++; item < items; item = next++) work(item);
    };
    std::vector<std::thread> helpers;
    for (int i = 1; i < threads && i < items; ++i) helpers.emplace_back(loop);
    loop();
    for (auto& helper : helpers) helper.join();
#endif
}

template <typename T>
Item item_at(const Problem<T>& p, long index) {
    const long width = p.channels / p.groups, lanes = 64 / sizeof(T);
    const long blocks = (width + lanes - 1) / lanes, step = (blocks + p.chunks - 1) / p.chunks * lanes;
    const long first = index % p.chunks * step;
    return {index, index / p.chunks / p.groups, index / p.chunks % p.groups, first < width ? first : width,
            first + step < width ? first + step : width};
}

template <typename T>
int run(const Problem<T>& p, int threads) {
    if (p.states < 1 || p.states > MOST_STATES) return 1;
    const Kernels<T> kernels = pick(p);
    const bool backward = p.dy != nullptr;
    spread(p.batch * p.groups * p.chunks, threads, [&](long index) {
        const Item item = item_at(p, index);
        if (!backward) return kernels.forward(p, item);
        std::vector<char> memory(((2 * p.length + 2 * TILE + 1) * p.states + 1) * 64);
        const uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63);
        kernels.backward(p, item, reinterpret_cast<void*>(aligned));
    });
    return 0;
}

}  // namespace

#ifdef _WIN32
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The tensors and sizes in the order of Problem; `dy` null for the forward. Not 0: no kernel for that number of states.
#define ENTRY_POINT(T, NAME)                                                                                             \
    EXPORT int NAME(T* const* tensors, const long long* sizes, int threads) {                                            \
        Problem<T> p;                                                                                                    \
        T* const* t = tensors;                                                                                           \
        p.u = *t++, p.delta = *t++, p.A = *t++, p.B = *t++, p.C = *t++, p.dy = *t++, p.dlast = *t++;                     \
        p.y = *t++, p.starts = *t++, p.last = *t++, p.du = *t++, p.ddelta = *t++, p.dA = *t++, p.dB = *t++, p.dC = *t++; \
        const long long* n = sizes;                                                                                      \
        p.batch = *n++, p.length = *n++, p.channels = *n++, p.groups = *n++, p.states = *n++, p.tiles = *n++;            \
        p.chunks = *n++, p.u_batch = *n++, p.u_time = *n++, p.delta_batch = *n++, p.delta_time = *n++;                   \
        return run(p, threads);                                                                                          \
    }
ENTRY_POINT(float, scan_f32)
ENTRY_POINT(double, scan_f64)

// Some linkers are told that every extension module exports this; nothing imports the library as a module.
EXPORT void* PyInit__kernel() { return nullptr; }
