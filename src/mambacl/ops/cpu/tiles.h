// Tiles of TILE times by W channels: read from and written to tensors of any strides. Included after lanes.h.
//
// If the channels of a tensor are contiguous, a tile is read in place, row by row. If the times are, as in the public
// (b, d, l), it is transposed by quads of 16 bytes through a buffer. Any other layout is copied number by number.

struct Place {
    long long image, step, steps, channel, count;  // steps are times in the order of the scan; `count` <= W channels
};

static INLINE Place place_at(const Problem<T>& p, const Item& item, long long tile, long long block) {
    const long long step = tile * TILE, channel = item.first + block * W;
    return {item.image, step, least(p.length - step, TILE), channel, least(item.end - channel, W)};
}

#if BYTES
static const int Q = 16 / sizeof(T);
typedef T Quad __attribute__((vector_size(16)));
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#ifdef SINGLE
typedef int32_t Order __attribute__((vector_size(16)));
#else
typedef int64_t Order __attribute__((vector_size(16)));
#endif
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Order{__VA_ARGS__})
#endif

static INLINE void transpose(Quad* rows) {
#ifdef SINGLE
    const Quad a = SHUFFLE(rows[0], rows[1], 0, 4, 1, 5), b = SHUFFLE(rows[0], rows[1], 2, 6, 3, 7);
    const Quad c = SHUFFLE(rows[2], rows[3], 0, 4, 1, 5), d = SHUFFLE(rows[2], rows[3], 2, 6, 3, 7);
    rows[0] = SHUFFLE(a, c, 0, 1, 4, 5), rows[1] = SHUFFLE(a, c, 2, 3, 6, 7);
    rows[2] = SHUFFLE(b, d, 0, 1, 4, 5), rows[3] = SHUFFLE(b, d, 2, 3, 6, 7);
#else
    const Quad a = SHUFFLE(rows[0], rows[1], 0, 2), b = SHUFFLE(rows[0], rows[1], 1, 3);
    rows[0] = a, rows[1] = b;
#endif
}
#undef SHUFFLE
#else
static const int Q = 1;
typedef T Quad;
static INLINE void transpose(Quad*) {}
#endif

// Rows of W numbers each, one per step.
template <typename U>
struct Rows {
    U* at;
    long long step;
    U* operator[](long long t) const { return at + t * step; }
};

template <typename U>
static INLINE bool in_place(const View<U>& view, const Place& place) {
    return view.channel == 1 && place.count == W;
}

template <typename U>
static INLINE Rows<U> rows_in_place(const View<U>& view, const Place& place, long long length, bool reverse) {
    const long long time = reverse ? length - 1 - place.step : place.step;
    U* at = view.at + place.image * view.batch + time * view.time + place.channel * view.channel;
    return {at, reverse ? -view.time : view.time};
}

// The tile's first time in memory, of its first channel.
template <typename U>
static INLINE U* corner(const View<U>& view, const Place& place, long long length, bool reverse) {
    const long long begin = reverse ? length - place.step - place.steps : place.step;
    return view.at + place.image * view.batch + begin * view.time + place.channel * view.channel;
}

// Prefetches a tile: it consists of short pieces of many rows, which processors do not predict. The pieces go to the L2
// cache, because L1 takes few requests at a time. Small tensors are cached anyway. Always inlined: GCC drops calls of a
// function that only prefetches.
static const long long SMALL = 1 << 17;  // bytes of a tensor

template <typename U>
static INLINE void fetch(const Problem<T>& p, const View<U>& view, const Place& place) {
    if (!view.at || p.batch * p.length * p.channels * (long long)sizeof(T) <= SMALL) return;
    U* at = corner(view, place, p.length, p.reverse);
    if (view.channel == 1) {
        const U* end = at + place.count;
        if ((uintptr_t(end) - 1) / 64 == (uintptr_t(at) - 1) / 64) return;  // same cache line as the previous block
        for (long long t = 0; t < place.steps; ++t) PREFETCH(at + t * view.time + place.count - 1);
    } else if (view.time == 1) {
        for (long long c = 0; c < place.count; ++c) {
            PREFETCH(at + c * view.channel);
            PREFETCH(at + c * view.channel + place.steps - 1);  // most pieces lie on two cache lines
        }
    }
}

// Copies between a tile of the tensor and the buffer (TILE, W): into the buffer, or back.
template <bool BACK, typename U>
static void carry(const View<U>& view, const Place& place, long long length, bool reverse, T* buffer) {
    U* at = corner(view, place, length, reverse);
    T* row = reverse ? buffer + (place.steps - 1) * W : buffer;
    const long long step = reverse ? -W : W;
    long long whole = 0;
    if (view.time == 1 && place.count == W) {
        whole = place.steps / Q * Q;
        for (long long t = 0; t < whole; t += Q)
            for (long long c = 0; c < W; c += Q) {
                Quad quads[Q];
                for (int i = 0; i < Q; ++i)
                    memcpy(&quads[i], BACK ? row + (t + i) * step + c : at + (c + i) * view.channel + t, sizeof(Quad));
                transpose(quads);
                for (int i = 0; i < Q; ++i)
                    memcpy(BACK ? (T*)at + (c + i) * view.channel + t : row + (t + i) * step + c, &quads[i], sizeof(Quad));
            }
    } else if (!BACK && place.count < W) {
        memset(buffer, 0, sizeof(T) * W * place.steps);
    }
    for (long long t = whole; t < place.steps; ++t)
        for (long long c = 0; c < place.count; ++c) {
            T* there = (T*)at + t * view.time + c * view.channel;
            if (BACK)
                *there = row[t * step + c];
            else
                row[t * step + c] = *there;
        }
}

// The rows of a tile, in place or copied to the buffer. Channels beyond `count` are zero.
static INLINE Rows<const T> rows_of(
    const View<const T>& view, const Place& place, long long length, bool reverse, T* buffer) {
    if (in_place(view, place)) return rows_in_place(view, place, length, reverse);
    carry<false>(view, place, length, reverse, buffer);
    return {buffer, W};
}

// Rows to write to; `flush` then copies them to the tensor if they are in the buffer.
static INLINE Rows<T> rows_for(const View<T>& view, const Place& place, long long length, bool reverse, T* buffer) {
    if (in_place(view, place)) return rows_in_place(view, place, length, reverse);
    return {buffer, W};
}

static INLINE void flush(const View<T>& view, const Place& place, long long length, bool reverse, T* buffer) {
    if (!in_place(view, place)) carry<true>(view, place, length, reverse, buffer);
}

// The first `count` lanes of a row, for the last block of a group of channels.
static INLINE Lanes load_some(const T* from, long long count) {
    if (count == W) return load(from);
    T row[W] = {};
    for (long long i = 0; i < count; ++i) row[i] = from[i];
    return load(row);
}

static INLINE void store_some(T* to, Lanes value, long long count) {
    if (count == W) return store(to, value);
    T row[W];
    store(row, value);
    for (long long i = 0; i < count; ++i) to[i] = row[i];
}

// A column of a matrix with the channels as rows: the values of W channels.
static INLINE Lanes gather(const T* from, long long step, long long count) {
    T row[W] = {};
    for (long long i = 0; i < count; ++i) row[i] = from[i * step];
    return load(row);
}

static INLINE void scatter(T* to, long long step, Lanes value, long long count) {
    T row[W];
    store(row, value);
    for (long long i = 0; i < count; ++i) to[i * step] = row[i];
}

// The sums of the lanes of each of `count` vectors.
static void totals(const Lanes* from, T* to, long long count) {
    const T* lanes = reinterpret_cast<const T*>(from);
    long long i = 0;
    for (; i + Q <= count; i += Q) {
        Quad rows[Q];
        for (int j = 0; j < Q; ++j) {
            Quad sum, other;
            memcpy(&sum, lanes + (i + j) * W, sizeof(Quad));
            for (int k = Q; k < W; k += Q) {
                memcpy(&other, lanes + (i + j) * W + k, sizeof(Quad));
                sum += other;
            }
            rows[j] = sum;
        }
        transpose(rows);
        for (int j = 1; j < Q; ++j) rows[0] += rows[j];
        memcpy(to + i, rows, sizeof(Quad));
    }
    for (; i < count; ++i) {
        T sum = 0;
        for (int k = 0; k < W; ++k) sum += lanes[i * W + k];
        to[i] = sum;
    }
}
