// The arguments of one call of the scan; the same for every instruction set.

#ifndef MAMBACL_PROBLEM_H
#define MAMBACL_PROBLEM_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static const int TILE = 16, MOST_STATES = 256;  // time steps between kept states; largest number of states

static inline long long least(long long a, long long b) { return a < b ? a : b; }

// Strides count elements and can have any value, also zero or negative.
template <typename T>
struct View {  // (b, l, d); `at` is null if the tensor is missing
    T* at;
    long long batch, time, channel;
};

template <typename T>
struct Shared {  // B or C (b, l, g, n); the kernels need contiguous states
    const T* at;
    long long batch, time, group, state;
};

template <typename T>
struct Problem {
    View<const T> u, delta, z, dout;
    View<T> out, du, ddelta, dz;
    Shared<T> B, C;
    const T *A, *D, *bias, *dlast;  // A (d, n) with two strides; D, bias (d,); dlast (b, d, n)
    long long A_channel, A_state;
    T *last, *kept;                              // (b, d, n); (b, tiles, n, d)
    T *dA, *dB, *dC, *dD, *dbias;                // (d, n); (b, l, g, n) twice; (d,) twice
    T *part_A, *part_D, *part_bias;              // sums of each image: (b, n, d); (b, d) twice
    T *part_B, *part_C;                          // sums of each item's channels, (items, l, n)
    long long batch, length, channels, groups, states;
    long long chunks, chunk;                     // parts of a group of channels, and the channels of each but the last
    bool log_A, softplus, reverse;

    long long tiles() const { return (length + TILE - 1) / TILE; }
    long long width() const { return channels / groups; }
};

// Some channels of one group of one image.
struct Item {
    long long index, image, group, first, end;  // channels from first to end, counted over all groups
};

template <typename T>
Item item_at(const Problem<T>& p, long long index) {
    const long long group = index / p.chunks % p.groups, start = group * p.width();
    const long long first = index % p.chunks * p.chunk, end = first + p.chunk;
    return {index, index / p.chunks / p.groups, group, start + first, start + least(end, p.width())};
}

#endif
