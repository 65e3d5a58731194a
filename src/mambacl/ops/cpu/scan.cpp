// The selective scan on the CPU: a plain shared library with a C interface, called through ctypes.
//
// It needs neither Python's nor PyTorch's headers nor the C++ standard library, so one build serves every version of them.
// The kernel is compiled once per instruction set, each with its own vector size.

#include <stdlib.h>
#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of the intrinsics' own headers
#endif
#elif defined(__GNUC__) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "problem.h"

#ifdef __GNUC__
#define RESTRICT __restrict__
#define INLINE inline __attribute__((always_inline))
#define APART __attribute__((noinline))
#define PREFETCH(at) __builtin_prefetch(at, 0, 2)
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#else
#define RESTRICT __restrict
#define INLINE inline
#define APART
#define PREFETCH(at)
#define UNROLL
#endif

// States that stay in registers together.
#define FORWARD_STATES 4
#define BACKWARD_STATES 4

#if defined(__GNUC__) && !defined(MAMBACL_SCALAR)  // GCC's vector types, which Clang has too
#define VECTORS
#endif

#if defined(VECTORS) && defined(__x86_64__)
#define X86
#define BYTES 64
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#endif
namespace avx512 {
#include "instruction_set.h"
}
#undef BYTES
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define BYTES 32
namespace avx2 {
#include "instruction_set.h"
}
#undef BYTES
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#ifdef VECTORS
#define BYTES 16  // SSE2, NEON, or whatever the compiler maps it to
#else
#define BYTES 0
#endif
namespace narrow {
#include "instruction_set.h"
}

#include "threads.h"

namespace {

enum Set { BASELINE, AVX2, AVX512, NEON, SETS };

bool available(int set) {
#ifdef X86
    if (set == AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (set == AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(VECTORS) && defined(__aarch64__)
    return set == NEON;
#else
    return set == BASELINE;
#endif
}

template <typename T>
struct Kernel {
    long long (*vectors)(const Problem<T>&);  // memory of one item
    void (*item)(const Problem<T>&, const Item&, void*);
    long long bytes;  // of a vector
};

#define KERNEL(SET, TYPE)                                                                                   \
    (backward ? Kernel<T>{SET::TYPE::backward_lanes, SET::TYPE::backward_item, sizeof(SET::TYPE::Lanes)} \
              : Kernel<T>{SET::TYPE::forward_lanes, SET::TYPE::forward_item, sizeof(SET::TYPE::Lanes)})
#ifdef X86
#define CHOOSE(TYPE)                                 \
    if (set == AVX512) return KERNEL(avx512, TYPE); \
    if (set == AVX2) return KERNEL(avx2, TYPE);     \
    return KERNEL(narrow, TYPE);
#else
#define CHOOSE(TYPE) return (void)set, KERNEL(narrow, TYPE);
#endif
Kernel<float> choose(const Problem<float>&, int set, bool backward) {
    typedef float T;
    CHOOSE(f32)
}
Kernel<double> choose(const Problem<double>&, int set, bool backward) {
    typedef double T;
    CHOOSE(f64)
}

// The first phase of a backward writes sums per image and per item. The second adds them, always in the same order, so
// that neither the number of threads nor the other images of a batch change the result.
template <typename T>
void add_items(const Problem<T>& p, const T* part, T* to, long long image, long long group) {
    const T* from = part + (image * p.groups + group) * p.chunks * p.length * p.states;
    for (long long t = 0; t < p.length; ++t) {
        T* row = to + ((image * p.length + t) * p.groups + group) * p.states;
        for (long long n = 0; n < p.states; ++n) row[n] = from[t * p.states + n];
        for (long long chunk = 1; chunk < p.chunks; ++chunk)
            for (long long n = 0; n < p.states; ++n) row[n] += from[(chunk * p.length + t) * p.states + n];
    }
}

template <typename T>
void add_images(const T* part, T* to, long long count, long long between, long long batch, long long step) {
    for (long long i = 0; i < count; ++i) to[i * step] = part[i];
    for (long long image = 1; image < batch; ++image)
        for (long long i = 0; i < count; ++i) to[i * step] += part[image * between + i];
}

template <typename T>
struct Phase {  // the two phases, in the form that `spread` calls
    const Problem<T>* p;
    Kernel<T> kernel;

    static void first(const void* self, long long index, void* memory) {
        const Phase& phase = *static_cast<const Phase*>(self);
        phase.kernel.item(*phase.p, item_at(*phase.p, index), memory);
    }

    static void second(const void* self, long long index, void*) {
        const Problem<T>& p = *static_cast<const Phase*>(self)->p;
        if (index < p.batch * p.groups) {
            add_items(p, p.part_B, p.dB, index / p.groups, index % p.groups);
            add_items(p, p.part_C, p.dC, index / p.groups, index % p.groups);
            return;
        }
        const Item item = item_at(p, index - p.batch * p.groups);
        const long long count = item.end - item.first, channels = p.channels, N = p.states;
        if (p.dA)
            for (long long n = 0; n < N; ++n)
                add_images(p.part_A + n * channels + item.first, p.dA + item.first * N + n, count, channels * N, p.batch, N);
        if (p.dD) add_images(p.part_D + item.first, p.dD + item.first, count, channels, p.batch, 1);
        if (p.dbias) add_images(p.part_bias + item.first, p.dbias + item.first, count, channels, p.batch, 1);
    }
};

// Copies B or C with other strides to `to`, the states contiguous.
template <typename T>
void line_up(const Problem<T>& p, Shared<T>& M, T* to) {
    for (long long image = 0; image < p.batch; ++image)
        for (long long group = 0; group < p.groups; ++group)
            for (long long t = 0; t < p.length; ++t) {
                const T* from = M.at + image * M.batch + t * M.time + group * M.group;
                T* row = to + ((image * p.length + t) * p.groups + group) * p.states;
                for (long long n = 0; n < p.states; ++n) row[n] = from[n * M.state];
            }
    M = {to, p.length * p.groups * p.states, p.groups * p.states, p.states, 1};
}

enum Failure { NONE, NO_SET, NO_STATES, NO_MEMORY };

template <typename T>
int run(Problem<T>& p, int set, int threads, Parallel parallel) {
    if (set < 0 || set >= SETS || !available(set)) return NO_SET;
    const bool backward = p.dout.at != nullptr;
    // Chunks of 64 channels, or more if there would be too many; this depends on the shape alone.
    const long long even = (p.width() + 15) / 16;
    p.chunk = (even + 63) / 64 * 64;
    p.chunks = (p.width() + p.chunk - 1) / p.chunk;
    const long long items = p.batch * p.groups * p.chunks;
    const Phase<T> phase = {&p, choose(p, set, backward)};
    const long long work = p.batch * p.length * p.channels * p.states >> 16;  // less is done before another thread wakes up
    if (threads > 1 + work) threads = int(1 + work);
    const long long bytes = phase.kernel.vectors(p) * phase.kernel.bytes;
    if (!backward) return spread(phase.first, &phase, items, bytes, threads, parallel) ? NONE : NO_MEMORY;
    const long long of_B = items * p.length * p.states, of_A = p.batch * p.channels * p.states;
    T* memory = static_cast<T*>(malloc(sizeof(T) * (2 * of_B + of_A + 2 * p.batch * p.channels)));
    if (!memory) return NO_MEMORY;
    p.part_B = memory, p.part_C = p.part_B + of_B, p.part_A = p.part_C + of_B;
    p.part_D = p.part_A + of_A, p.part_bias = p.part_D + p.batch * p.channels;
    bool done = spread(phase.first, &phase, items, bytes, threads, parallel);
    done = done && spread(phase.second, &phase, p.batch * p.groups + p.groups * p.chunks, 0, threads, parallel);
    free(memory);
    return done ? NONE : NO_MEMORY;
}

// Reads the arguments in the order in which __init__.py writes them.
template <typename T>
struct Arguments {
    void* const* pointers;
    const long long* numbers;
    T* pointer() { return static_cast<T*>(*pointers++); }
    long long number() { return *numbers++; }
    template <typename U>
    void view(View<U>& view) {
        view.at = pointer(), view.batch = number(), view.time = number(), view.channel = number();
    }
    void shared(Shared<T>& shared) {
        shared.at = pointer(), shared.batch = number(), shared.time = number();
        shared.group = number(), shared.state = number();
    }
};

template <typename T>
int call(void* const* pointers, const long long* numbers, int set, int threads, Parallel parallel) {
    Arguments<T> next = {pointers, numbers};
    Problem<T> p;
    p.batch = next.number(), p.length = next.number(), p.channels = next.number();
    p.groups = next.number(), p.states = next.number();
    p.log_A = next.number() != 0, p.softplus = next.number() != 0, p.reverse = next.number() != 0;
    p.A = next.pointer(), p.A_channel = next.number(), p.A_state = next.number();
    next.shared(p.B), next.shared(p.C);
    p.D = next.pointer(), p.bias = next.pointer(), p.kept = next.pointer();
    next.view(p.u), next.view(p.delta), next.view(p.z), next.view(p.dout);
    if (p.dout.at) {
        p.dlast = next.pointer();
        p.dA = next.pointer(), p.dB = next.pointer(), p.dC = next.pointer();
        p.dD = next.pointer(), p.dbias = next.pointer();
        next.view(p.du), next.view(p.ddelta), next.view(p.dz);
    } else {
        p.last = next.pointer();
        next.view(p.out);
    }
    if (p.states < 1 || p.states > MOST_STATES) return NO_STATES;
    const long long size = p.batch * p.length * p.groups * p.states, copies = (p.B.state != 1) + (p.C.state != 1);
    T* memory = copies ? static_cast<T*>(malloc(sizeof(T) * copies * size)) : nullptr;
    if (copies && !memory) return NO_MEMORY;
    if (p.C.state != 1) line_up(p, p.C, memory + (copies - 1) * size);
    if (p.B.state != 1) line_up(p, p.B, memory);
    const int failure = run(p, set, threads, parallel);
    free(memory);
    return failure;
}

}  // namespace

#ifdef _WIN32
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

EXPORT int mambacl_scan_has(int set) { return available(set); }

// Returns a Failure. `parallel` is GOMP_parallel of the process's OpenMP, or null.
EXPORT int mambacl_scan_f32(void* const* pointers, const long long* numbers, int set, int threads, Parallel parallel) {
    return call<float>(pointers, numbers, set, threads, parallel);
}
EXPORT int mambacl_scan_f64(void* const* pointers, const long long* numbers, int set, int threads, Parallel parallel) {
    return call<double>(pointers, numbers, set, threads, parallel);
}

// Some build tools make the linker export this symbol; nothing imports the library as a Python module.
EXPORT void* PyInit__scan() { return nullptr; }
