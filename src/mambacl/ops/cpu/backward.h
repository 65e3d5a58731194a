// The backward of one item, for one number type and one instruction set. Included after forward.h.
//
// Tiles are processed from the last to the first. In each, a few states at a time are recomputed from the kept ones, and
// the gradient goes back through them while decays and states are in the cache.

typedef Steps<TILE> ShortSteps;

struct Slopes {
    Lanes g[TILE];                // the gradient of y_t
    Lanes of_input[TILE];         // sum over the states of q B: the gradient of dt_t u_t
    Lanes of_decay[TILE];         // sum over the states of f A log2(e): of dt_t, through the decays
    Lanes of_gate[TILE];          // the gradient of z_t, divided by y_t
};

// The decays of G states at all times of a tile. They do not depend on each other, so the processor never waits.
template <int G, bool SHORT>
static INLINE void decays(const Lanes* RESTRICT rates, const ShortSteps& RESTRICT steps, long long count,
                          Lanes* RESTRICT to, int between) {
    Lanes a[G];
    UNROLL for (int j = 0; j < G; ++j) a[j] = rates[j];
    for (long long t = 0; t < count; ++t) {
        const Lanes dt = steps.dt[t];
        UNROLL for (int j = 0; j < G; ++j) to[t * between + j] = power<SHORT>(dt, a[j]);
    }
}

// Recomputes G states of the tile, then q, the gradient of h_t, from end to start. dA gets the sum over time of
// dt f, with f = q_t exp(dt_t A) h_{t-1} the gradient of dt_t A; `sums` (TILE, 2, N) gets each lane's part of dB and dC.
// Values used together are stored together: addresses that differ by a multiple of 4 KiB would conflict in the cache.
template <int G, bool SHORT, bool GATE>
static void retreat(const Lanes* RESTRICT a, const Lanes* RESTRICT start, Lanes* RESTRICT gradient, Lanes* RESTRICT dA,
                    ShortSteps& RESTRICT steps, Slopes& RESTRICT slopes, Lanes* RESTRICT sums, Rows<const T> B,
                    Rows<const T> C, long long count, long long N) {
    Lanes past[TILE + 1][2][G], h[G];  // the decay of each time, and the state before it
    decays<G, SHORT>(a, steps, count, past[0][0], 2 * G);
    UNROLL for (int j = 0; j < G; ++j) h[j] = past[0][1][j] = start[j];
    for (long long t = 0; t < count; ++t) {
        const Lanes x = steps.x[t];
        const T *b = B[t], *c = C[t];
        Lanes sum = GATE ? steps.y[t] : Lanes{};
        UNROLL for (int j = 0; j < G; ++j) {
            h[j] = past[t][0][j] * h[j] + x * b[j];
            past[t + 1][1][j] = h[j];
            if (GATE) sum += h[j] * c[j];
        }
        if (GATE) steps.y[t] = sum;
    }
    Lanes q[G], of_A[G];
    UNROLL for (int j = 0; j < G; ++j) {
        q[j] = gradient[j];
        of_A[j] = dA[j];
    }
    for (long long t = count - 1; t >= 0; --t) {
        const Lanes dt = steps.dt[t], x = steps.x[t], g = slopes.g[t];
        const T *b = B[t], *c = C[t];
        Lanes of_input = slopes.of_input[t], of_decay = slopes.of_decay[t];
        Lanes *dB = sums + 2 * t * N, *dC = dB + N;
        UNROLL for (int j = 0; j < G; ++j) {
            q[j] += g * c[j];
            dC[j] += g * h[j];
            dB[j] += x * q[j];
            of_input += q[j] * b[j];
            q[j] *= past[t][0][j];
            h[j] = past[t][1][j];
            const Lanes f = q[j] * h[j];
            of_A[j] += dt * f;
            of_decay += f * a[j];
        }
        slopes.of_input[t] = of_input;
        slopes.of_decay[t] = of_decay;
    }
    UNROLL for (int j = 0; j < G; ++j) {
        gradient[j] = q[j];
        dA[j] = of_A[j];
    }
}

struct Block {  // the vectors of one block of channels, one per state
    Lanes *a, *q, *dA, *start;
};

template <bool SHORT, bool GATE>
static void retreat_all(const Block& k, ShortSteps& steps, Slopes& slopes, Lanes* sums, Rows<const T> B,
                        Rows<const T> C, long long count, long long N) {
    long long n = 0;
#define RETREAT(G)                                                                                                      \
    retreat<G, SHORT, GATE>(k.a + n, k.start + n, k.q + n, k.dA + n, steps, slopes, sums + n, {B.at + n, B.step}, \
                            {C.at + n, C.step}, count, N)
    for (; n + BACKWARD_STATES <= N; n += BACKWARD_STATES) RETREAT(BACKWARD_STATES);
    for (; n + 2 <= N; n += 2) RETREAT(2);
    for (; n < N; ++n) RETREAT(1);
#undef RETREAT
}

static long long backward_lanes(const Problem<T>& p) {  // vectors of memory for one item
    const long long blocks = (p.chunk + W - 1) / W, N = p.states;
    return blocks * (3 * N + 3) + N + 2 * TILE * N;
}

static void backward_item(const Problem<T>& p, const Item& item, void* memory) {
    const long long blocks = (item.end - item.first + W - 1) / W, N = p.states;
    const Cut cut = short_tiles(p);
    const bool ahead = fetches(p, cut);
    Lanes *a = static_cast<Lanes*>(memory), *q = a + blocks * N, *dA = q + blocks * N, *limit = dA + blocks * N;
    Lanes *dD = limit + blocks, *dbias = dD + blocks, *start = dbias + blocks, *sums = start + N;
    for (long long k = 0; k < blocks; ++k) {
        const long long channel = item.first + k * W, rest = item.end - channel, width = least(rest, W);
        limit[k] = rates(p, channel, width, a + k * N);
        dD[k] = dbias[k] = Lanes{};
        for (long long n = 0; n < N; ++n) {
            const T* dlast = p.dlast + (item.image * p.channels + channel) * N + n;
            q[k * N + n] = p.dlast ? gather(dlast, N, width) : Lanes{};
            dA[k * N + n] = Lanes{};
        }
    }
    ShortSteps steps = {};
    Slopes slopes = {};  // rows beyond the last tile are read but never used
    alignas(64) T buffers[4][TILE * W];
    for (long long tile = cut.tiles - 1; tile >= 0; --tile) {
        const long long begin = tile * TILE, count = least(p.length - begin, TILE);
        const Rows<const T> B = shared_rows(p.B, item, begin, p), C = shared_rows(p.C, item, begin, p);
        for (long long i = 0; i < 2 * TILE * N; ++i) sums[i] = Lanes{};
        const Place first = place_at(p, item, cut, tile > 0 ? tile - 1 : 0, 0);  // of the next tile
        for (long long k = 0; k < blocks; ++k) {
            const Place place = place_at(p, item, cut, tile, k);
            const Place next = k + 1 < blocks ? place_at(p, item, cut, tile, k + 1) : first;
            const long long channel = place.channel, width = place.count;
            const Rows<const T> u = rows_of(p.u, place, p.length, p.reverse, buffers[0]);
            const Rows<const T> delta = rows_of(p.delta, place, p.length, p.reverse, buffers[1]);
            const Rows<const T> dout = rows_of(p.dout, place, p.length, p.reverse, buffers[2]);
            const Lanes D = p.D ? load_some(p.D + channel, width) : Lanes{};
            prepare<true>(p, place, u, delta, limit[k], steps);
            if (ahead) {
                const View<const T>* const read[] = {&p.u, &p.delta, &p.z, &p.dout};
                const View<T>* const written[] = {&p.du, &p.ddelta, &p.dz};
                for (const View<const T>* view : read) fetch(p, *view, next);
                for (const View<T>* view : written) fetch(p, *view, next);
            }
            for (long long t = 0; t < count; ++t) {
                slopes.g[t] = load(dout[t]);
                slopes.of_input[t] = slopes.of_decay[t] = Lanes{};
            }
            if (p.z.at) {
                const Rows<const T> z = rows_of(p.z, place, p.length, p.reverse, buffers[3]);
                for (long long t = 0; t < count; t += TOGETHER) {  // rows beyond the last are computed but never used
                    Lanes gates[TOGETHER], rest;
                    load_together(z, t, count, gates);
                    UNROLL for (int j = 0; j < TOGETHER; ++j) {
                        const Lanes given = slopes.g[t + j], of = sigmoid(gates[j], rest);
                        slopes.g[t + j] = given * (gates[j] * of);
                        slopes.of_gate[t + j] = given * (of * (gates[j] * rest + T(1)));
                    }
                }
            }
            for (long long n = 0; n < N; ++n)
                start[n] = load_some(p.kept + ((item.image * cut.tiles + tile) * N + n) * p.channels + channel, width);
            const Block block = {a + k * N, q + k * N, dA + k * N, start};
            if (p.z.at)
                (steps.in_range ? retreat_all<true, true> : retreat_all<false, true>)(
                    block, steps, slopes, sums, B, C, count, N);
            else
                (steps.in_range ? retreat_all<true, false> : retreat_all<false, false>)(
                    block, steps, slopes, sums, B, C, count, N);
            const Rows<T> du = rows_for(p.du, place, p.length, p.reverse, buffers[3]);
            const Rows<T> ddelta = rows_for(p.ddelta, place, p.length, p.reverse, buffers[1]);
            for (long long t = 0; t < count; ++t) {
                const Lanes x = load(u[t]), g = slopes.g[t];
                const Lanes slope = (x * slopes.of_input[t] + slopes.of_decay[t] * LN2) * steps.slope[t];
                dD[k] += g * x;
                dbias[k] += slope;
                store(du[t], steps.dt[t] * slopes.of_input[t] + g * D);
                store(ddelta[t], slope);
            }
            flush(p.du, place, p.length, p.reverse, buffers[3]);
            flush(p.ddelta, place, p.length, p.reverse, buffers[1]);
            if (p.z.at) {
                const Rows<T> dz = rows_for(p.dz, place, p.length, p.reverse, buffers[2]);
                for (long long t = 0; t < count; ++t) store(dz[t], slopes.of_gate[t] * steps.y[t]);
                flush(p.dz, place, p.length, p.reverse, buffers[2]);
            }
        }
        for (long long t = 0; t < count; ++t) {
            const long long time = p.reverse ? p.length - 1 - begin - t : begin + t;
            totals(sums + 2 * t * N, p.part_B + (item.index * p.length + time) * N, N);
            totals(sums + (2 * t + 1) * N, p.part_C + (item.index * p.length + time) * N, N);
        }
    }
    for (long long k = 0; k < blocks; ++k) {
        const long long channel = item.first + k * W, rest = item.end - channel, width = least(rest, W);
        for (long long n = 0; n < N; ++n) {
            const Lanes sum = p.log_A ? dA[k * N + n] * (a[k * N + n] * LN2) : dA[k * N + n];  // d(-exp(A)) = -exp(A) dA
            store_some(p.part_A + (item.image * N + n) * p.channels + channel, sum, width);
        }
        store_some(p.part_D + item.image * p.channels + channel, dD[k], width);
        store_some(p.part_bias + item.image * p.channels + channel, dbias[k], width);
    }
}
