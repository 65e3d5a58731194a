// The selective scan of one block of W neighbouring channels, forward and backward.
//
// Included once per instruction set by kernel.cpp, inside a namespace of its own. Nothing from the standard library is
// used here: a library template compiled under a wide instruction set could be shared with code for narrower machines.
//
//   h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t,   y_t = <C_t, h_t>,   h_{-1} = 0
//
// A vector value holds W channels; the states are the loop. T is the number type, Problem (kernel.cpp) the whole call; the
// channels of a tensor are contiguous.

enum { W = 64 / sizeof(T) };
typedef T Lanes __attribute__((vector_size(64)));
typedef int Bits __attribute__((vector_size(W * sizeof(int))));

// `count` < W only in the last block of a group of channels: the other lanes are zero and go nowhere.
static inline Lanes load(const T* from, long count) {
    Lanes value = {};
    if (count == W)
        __builtin_memcpy(&value, from, sizeof(value));
    else
        for (long i = 0; i < count; ++i) value[i] = from[i];
    return value;
}

static inline void store(T* to, Lanes value, long count) {
    if (count == W)
        __builtin_memcpy(to, &value, sizeof(value));
    else
        for (long i = 0; i < count; ++i) to[i] = value[i];
}

static inline T total(Lanes value) {
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) value[i] += value[i + half];
    return value[0];
}

static inline Lanes exponential(Lanes x) {
#ifdef SINGLE
    // exp(x) = 2^k exp(r), |r| <= ln(2)/2, with a polynomial for exp(r); below -87.3 the result is about 1e-38, not 0.
    Lanes clamped = x < -87.3f ? Lanes{} - 87.3f : x;  // a NaN fails the comparison and passes through
    clamped = clamped > 88.7f ? Lanes{} + 88.7f : clamped;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, in the low bits
    const Lanes shifted = clamped * 1.44269504088896341f + magic;
    const Lanes k = shifted - magic;
    const Lanes r = clamped - k * 0.693359375f - k * -2.12194440054690583e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Bits power;
    __builtin_memcpy(&power, &shifted, sizeof(power));
    power = (power + 127) << 23;  // the bits of 2^k: those of the magic number leave at the top
    Lanes scale;
    __builtin_memcpy(&scale, &power, sizeof(scale));
    return x > 88.7f ? x * __builtin_inff() : p * scale;
#else
    for (int i = 0; i < W; ++i) x[i] = __builtin_exp(x[i]);
    return x;
#endif
}

// N is the number of states where it is known to the compiler, else 0.
template <int N>
static void forward_block(const Problem<T>& p, long b, long group, long d, long count) {
    const long states = N ? N : p.states;
    const T *u = p.u + b * p.u_batch + d, *delta = p.delta + b * p.delta_batch + d;
    const T *B = p.B + (b * p.length * p.groups + group) * states, *C = p.C + (B - p.B);
    T *y = p.y + b * p.length * p.channels + d, *starts = p.starts + b * p.tiles * states * p.channels + d;
    Lanes h[N ? N : MOST_STATES], a[N ? N : MOST_STATES];
    for (long n = 0; n < states; ++n) {
        h[n] = Lanes{};
        a[n] = load(p.A + n * p.channels + d, count);
    }
    for (long t = 0; t < p.length; ++t) {
        if (t % TILE == 0)
            for (long n = 0; n < states; ++n) store(starts + (t / TILE * states + n) * p.channels, h[n], count);
        const Lanes dt = load(delta + t * p.delta_time, count);
        const Lanes input = dt * load(u + t * p.u_time, count);
        Lanes sum = {};
        for (long n = 0; n < states; ++n) {
            h[n] = exponential(dt * a[n]) * h[n] + input * B[t * p.groups * states + n];
            sum += h[n] * C[t * p.groups * states + n];
        }
        store(y + t * p.channels, sum, count);
    }
    for (long n = 0; n < states; ++n) store(p.last + (b * states + n) * p.channels + d, h[n], count);
}

// Adds to dB, dC (L, N) of lanes; writes du, ddelta, dA. `scratch` holds (2 TILE + 1) N values.
template <int N>
static void backward_block(const Problem<T>& p, long b, long group, long d, long count, Lanes* RESTRICT scratch,
                           Lanes* RESTRICT dB, Lanes* RESTRICT dC) {
    const long states = N ? N : p.states;
    const T *u = p.u + b * p.u_batch + d, *delta = p.delta + b * p.delta_batch + d;
    const T *B = p.B + (b * p.length * p.groups + group) * states, *C = p.C + (B - p.B);
    const T *dy = p.dy + b * p.length * p.channels + d, *starts = p.starts + b * p.tiles * states * p.channels + d;
    T *du = p.du + (dy - p.dy), *ddelta = p.ddelta + (dy - p.dy);
    Lanes* decay = scratch;                  // (TILE, N)
    Lanes* state = scratch + TILE * states;  // (TILE + 1, N), the state at the start of the tile in front
    Lanes q[N ? N : MOST_STATES], sum[N ? N : MOST_STATES], a[N ? N : MOST_STATES];
    for (long n = 0; n < states; ++n) {
        a[n] = load(p.A + n * p.channels + d, count);
        q[n] = load(p.dlast + (b * states + n) * p.channels + d, count);  // the gradient of h_t
        sum[n] = Lanes{};
    }
    for (long tile = p.tiles - 1; tile >= 0; --tile) {
        const long begin = tile * TILE, end = begin + TILE < p.length ? begin + TILE : p.length;
        for (long n = 0; n < states; ++n) state[n] = load(starts + (tile * states + n) * p.channels, count);
        for (long t = begin; t < end; ++t) {
            const Lanes dt = load(delta + t * p.delta_time, count);
            const Lanes input = dt * load(u + t * p.u_time, count);
            Lanes *RESTRICT e = decay + (t - begin) * states, *h = state + (t - begin) * states;
            for (long n = 0; n < states; ++n) {
                e[n] = exponential(dt * a[n]);
                h[states + n] = e[n] * h[n] + input * B[t * p.groups * states + n];
            }
        }
        for (long t = end - 1; t >= begin; --t) {
            const Lanes dt = load(delta + t * p.delta_time, count), x = load(u + t * p.u_time, count);
            const Lanes g = load(dy + t * p.channels, count), input = dt * x;
            const Lanes *e = decay + (t - begin) * states, *h = state + (t - begin) * states;
            Lanes through_input = {}, through_decay = {};
            for (long n = 0; n < states; ++n) {
                q[n] += g * C[t * p.groups * states + n];
                dC[t * states + n] += g * h[states + n];
                dB[t * states + n] += input * q[n];
                through_input += q[n] * B[t * p.groups * states + n];
                q[n] *= e[n];
                const Lanes f = q[n] * h[n];  // the gradient of delta_t A
                sum[n] += dt * f;
                through_decay += f * a[n];
            }
            store(du + t * p.channels, dt * through_input, count);
            store(ddelta + t * p.channels, x * through_input + through_decay, count);
        }
    }
    for (long n = 0; n < states; ++n) store(p.dA + (b * states + n) * p.channels + d, sum[n], count);
}

// One item: a chunk of the blocks of one group of channels of one image.
static void forward_item(const Problem<T>& p, const Item& item) {
    for (long k = item.first; k < item.end; k += W) {
        const long d = item.group * (p.channels / p.groups) + k, count = item.end - k < W ? item.end - k : W;
        switch (p.states) {
            case 1: forward_block<1>(p, item.image, item.group, d, count); break;
            case 8: forward_block<8>(p, item.image, item.group, d, count); break;
            case 16: forward_block<16>(p, item.image, item.group, d, count); break;
            default: forward_block<0>(p, item.image, item.group, d, count);
        }
    }
}

// dB, dC (images, groups, chunks, L, N): the sums over the item's channels go to its own slice. `memory`: aligned, with room
// for (2 L + 2 TILE + 1) N vectors.
static void backward_item(const Problem<T>& p, const Item& item, void* memory) {
    const long plane = p.length * p.states;
    Lanes *dB = static_cast<Lanes*>(memory), *dC = dB + plane, *scratch = dC + plane;
    for (long i = 0; i < 2 * plane; ++i) dB[i] = Lanes{};
    for (long k = item.first; k < item.end; k += W) {
        const long d = item.group * (p.channels / p.groups) + k, count = item.end - k < W ? item.end - k : W;
        switch (p.states) {
            case 1: backward_block<1>(p, item.image, item.group, d, count, scratch, dB, dC); break;
            case 8: backward_block<8>(p, item.image, item.group, d, count, scratch, dB, dC); break;
            case 16: backward_block<16>(p, item.image, item.group, d, count, scratch, dB, dC); break;
            default: backward_block<0>(p, item.image, item.group, d, count, scratch, dB, dC);
        }
    }
    for (long i = 0; i < plane; ++i) {
        p.dB[item.index * plane + i] = total(dB[i]);
        p.dC[item.index * plane + i] = total(dC[i]);
    }
}
