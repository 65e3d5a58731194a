// The forward of one item, for one number type and one instruction set. Included after tiles.h.
//
//   dt = softplus(delta + bias);  h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t;  y_t = <C_t, h_t> + D u_t;  out = y silu(z)
//
// Time is cut into tiles. Within a tile, blocks of W channels are processed in turn, so that whole cache lines of a tensor
// are used together. Within a block, all dt are computed first. Then a few states at a time go through all times of the
// tile, so that they stay in registers and their dependency chains overlap. The gate comes last. Each of the three is a
// function by itself (APART): in a long one, constants would not stay in registers.

// B or C of one image and group, in the order of the scan.
static INLINE Rows<const T> shared_rows(const Shared<T>& M, const Item& item, long long step, const Problem<T>& p) {
    const long long time = p.reverse ? p.length - 1 - step : step;
    return {M.at + item.image * M.batch + item.group * M.group + time * M.time, p.reverse ? -M.time : M.time};
}

// A of a block as (n) vectors, times log2(e): decays are powers of two from here on. Returns the largest dt for which the
// short form of `power` covers every decay.
static INLINE Lanes rates(const Problem<T>& p, long long channel, long long count, Lanes* a) {
    Lanes most = {}, unknown = {};  // NaN if a rate is NaN
    const T* from = p.A + channel * p.A_channel;
    long long read = 0;
    if (p.A_state == 1 && count == W)
        for (; read + Q <= p.states; read += Q) load_across(from + read, p.A_channel, a + read);
    for (; read < p.states; ++read) a[read] = gather(from + read * p.A_state, p.A_channel, count);
    for (long long n = 0; n < p.states; ++n) {
        if (p.log_A) a[n] = -exponential(a[n] > MOST_EXP ? splat(MOST_EXP) : a[n]);
        a[n] *= LOG2E;
        const Lanes size = magnitude(a[n]);
        most = size > most ? size : most;
        unknown += size * T(0);
    }
    return MOST_POWER / (most + unknown);
}

template <int MOST>
struct Steps {
    Lanes dt[MOST], x[MOST];  // dt_t; dt_t u_t
    Lanes y[MOST];            // D u_t, to which the states add <C_t, h_t>
    Lanes slope[MOST];        // of dt_t by delta_t, in a backward
    bool in_range;            // whether the short form of `power` covers every decay
};
typedef Steps<MOST_STEPS> LongSteps;

template <bool SLOPE, int MOST, typename Source>
static APART void prepare(const Problem<T>& p, const Place& place, Source u, Source delta, Lanes limit,
                          Steps<MOST>& RESTRICT steps) {
    const long long count = place.steps;
    const Lanes bias = p.bias ? load_some(p.bias + place.channel, place.count) : Lanes{};
    const Lanes D = p.D ? load_some(p.D + place.channel, place.count) : Lanes{};
    Mask fits = limit == limit;
    for (long long t = 0; t < count; t += TOGETHER) {
        const long long at = together(t, count);
        Lanes raw[TOGETHER];
        load_together(delta, at, count, raw);
        UNROLL for (int j = 0; j < TOGETHER; ++j) steps.dt[at + j] = raw[j] + bias;
    }
    if (p.softplus)
        for (long long t = 0; t < count; t += TOGETHER)  // rows beyond the last are computed but never used
            softplus<TOGETHER, SLOPE>(steps.dt + t, steps.slope + t);
    for (long long t = 0; t < count; t += TOGETHER) {
        const long long at = together(t, count);
        Lanes x[TOGETHER];
        load_together(u, at, count, x);
        UNROLL for (int j = 0; j < TOGETHER; ++j) {
            const Lanes dt = steps.dt[at + j];
            steps.x[at + j] = dt * x[j];
            steps.y[at + j] = D * x[j];
            if (SLOPE && !p.softplus) steps.slope[at + j] = splat(T(1));
            fits &= magnitude(dt) <= limit;
        }
    }
    steps.in_range = all(fits);
}

// G states through the times of a tile. Inlined into a long function, it would share the registers with that.
template <int G, bool SHORT>
static APART void advance(const Lanes* RESTRICT rates, Lanes* RESTRICT states, LongSteps& RESTRICT steps,
                          Rows<const T> B, Rows<const T> C, long long count) {
    Lanes a[G], h[G];
    UNROLL for (int j = 0; j < G; ++j) h[j] = states[j], a[j] = rates[j];
    for (long long t = 0; t < count; ++t) {
        const Lanes x = steps.x[t], dt = steps.dt[t];
        const T *b = B[t], *c = C[t];
        Lanes sum = steps.y[t];
        UNROLL for (int j = 0; j < G; ++j) {
            h[j] = power<SHORT>(dt, a[j]) * h[j] + x * b[j];
            sum += h[j] * c[j];
        }
        steps.y[t] = sum;
    }
    UNROLL for (int j = 0; j < G; ++j) states[j] = h[j];
}

template <bool SHORT>
static void advance_all(const Problem<T>& p, const Lanes* a, Lanes* states, LongSteps& steps, Rows<const T> B,
                        Rows<const T> C, long long count) {
    long long n = 0;
    for (; n + FORWARD_STATES <= p.states; n += FORWARD_STATES)
        advance<FORWARD_STATES, SHORT>(a + n, states + n, steps, {B.at + n, B.step}, {C.at + n, C.step}, count);
    for (; n + 2 <= p.states; n += 2)
        advance<2, SHORT>(a + n, states + n, steps, {B.at + n, B.step}, {C.at + n, C.step}, count);
    for (; n < p.states; ++n)
        advance<1, SHORT>(a + n, states + n, steps, {B.at + n, B.step}, {C.at + n, C.step}, count);
}

// The outputs of a tile, gated.
template <typename Source, typename Target>
static APART void finish(Source z, bool gated, const LongSteps& steps, Target out, long long count) {
    for (long long t = 0; t < count; t += TOGETHER) {
        const long long at = together(t, count);
        Lanes y[TOGETHER];
        UNROLL for (int j = 0; j < TOGETHER; ++j) y[j] = steps.y[at + j];
        if (gated) {
            Lanes gates[TOGETHER];
            load_together(z, at, count, gates);
            gate<TOGETHER>(gates);
            UNROLL for (int j = 0; j < TOGETHER; ++j) y[j] *= gates[j];
        }
        store_together(out, at, count, y);
    }
}

static long long forward_lanes(const Problem<T>& p) {  // vectors of memory for one item
    const long long blocks = (p.chunk + W - 1) / W;
    return blocks * (2 * p.states + 1);
}

static void forward_item(const Problem<T>& p, const Item& item, void* memory) {
    const long long blocks = (item.end - item.first + W - 1) / W, N = p.states;
    const Cut cut = p.kept ? short_tiles(p) : long_tiles(p);
    const bool ahead = fetches(p, cut);
    Lanes *a = static_cast<Lanes*>(memory), *h = a + blocks * N, *limit = h + blocks * N;
    for (long long k = 0; k < blocks; ++k) {
        const long long channel = item.first + k * W, rest = item.end - channel;
        limit[k] = rates(p, channel, least(rest, W), a + k * N);
        for (long long n = 0; n < N; ++n) h[k * N + n] = Lanes{};
    }
    LongSteps steps = {};
    alignas(64) T buffers[2][MOST_STEPS * W];
    for (long long tile = 0; tile < cut.tiles; ++tile) {
        const long long begin = tile * cut.step;
        const Rows<const T> B = shared_rows(p.B, item, begin, p), C = shared_rows(p.C, item, begin, p);
        const Place first = place_at(p, item, cut, least(tile + 1, cut.tiles - 1), 0);  // of the next tile
        for (long long k = 0; k < blocks; ++k) {
            const Place place = place_at(p, item, cut, tile, k);
            const Place next = k + 1 < blocks ? place_at(p, item, cut, tile, k + 1) : first;
            if (in_columns(p.u, place, p.reverse) && in_columns(p.delta, place, p.reverse))
                prepare<false>(p, place, columns_of(p.u, place), columns_of(p.delta, place), limit[k], steps);
            else
                prepare<false>(p, place, rows_of(p.u, place, p.length, p.reverse, buffers[0]),
                               rows_of(p.delta, place, p.length, p.reverse, buffers[1]), limit[k], steps);
            if (ahead) {
                const View<const T>* const read[] = {&p.u, &p.delta, &p.z};
                for (const View<const T>* view : read) fetch(p, *view, next);
                fetch(p, p.out, next);
            }
            if (p.kept)
                for (long long n = 0; n < N; ++n)
                    store_some(p.kept + ((item.image * cut.tiles + tile) * N + n) * p.channels + place.channel, h[k * N + n],
                               place.count);
            (steps.in_range ? advance_all<true> : advance_all<false>)(p, a + k * N, h + k * N, steps, B, C, place.steps);
            if (in_columns(p.out, place, p.reverse) && (!p.z.at || in_columns(p.z, place, p.reverse))) {
                finish(columns_of(p.z, place), p.z.at, steps, columns_of(p.out, place), place.steps);
            } else {
                const Rows<const T> z = p.z.at ? rows_of(p.z, place, p.length, p.reverse, buffers[0]) : Rows<const T>();
                finish(z, p.z.at, steps, rows_for(p.out, place, p.length, p.reverse, buffers[1]), place.steps);
                flush(p.out, place, p.length, p.reverse, buffers[1]);
            }
        }
    }
    for (long long k = 0; k < blocks; ++k) {
        const long long channel = item.first + k * W, rest = item.end - channel;
        T* last = p.last + (item.image * p.channels + channel) * N;
        long long n = 0;
        if (rest >= W)
            for (; n + Q <= N; n += Q) store_across(last + n, N, h + k * N + n);
        for (; n < N; ++n) scatter(last + n, N, h[k * N + n], least(rest, W));
    }
}
