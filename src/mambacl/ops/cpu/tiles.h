// Tiles of some times by W channels: read from and written to tensors of any strides. Included after lanes.h.
//
// If the channels of a tensor are contiguous, a tile is read in place, row by row. If the times are, as in the public
// (b, d, l), it is transposed by quads of 16 bytes: by the forward in registers, by the backward, which reads a tile more
// than once, through a buffer. Any other layout is copied number by number.

static const int TOGETHER = 4;  // times that are read and computed at once

// Sizes of tiles. A few times that remain go with the last tile.
struct Cut {
    long long step, tiles;
    long long length(long long tile, long long times) const { return tile + 1 < tiles ? step : times - tile * step; }
};
static const int LONG_TILE = 64;
static const int MOST_STEPS = LONG_TILE + TOGETHER;

// The backward wants the states at the start of each TILE times.
static INLINE Cut short_tiles(const Problem<T>& p) { return {TILE, p.tiles()}; }

// Without it, tiles of equal size; the fewer, the less often registers are filled and loops begin.
static INLINE Cut long_tiles(const Problem<T>& p) {
    const long long times = p.length < TOGETHER ? 1 : p.length - TOGETHER + 1;
    const long long tiles = (times + LONG_TILE - 1) / LONG_TILE;
    const long long step = ((times + tiles - 1) / tiles + TOGETHER - 1) / TOGETHER * TOGETHER;
    return {step, (times + step - 1) / step};
}

struct Place {
    long long image, step, steps, channel, count;  // steps are times in the order of the scan; `count` <= W channels
};

static INLINE Place place_at(const Problem<T>& p, const Item& item, const Cut& cut, long long tile, long long block) {
    const long long channel = item.first + block * W;
    return {item.image, tile * cut.step, cut.length(tile, p.length), channel, least(item.end - channel, W)};
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

// Whether to prefetch tiles. They consist of pieces of many rows. Processors predict the long ones and reach for the next
// in time if few instructions lie between, unless they come from memory. Small tensors are cached anyway.
static bool fetches(const Problem<T>& p, const Cut& cut) {
    const bool predicted = cut.step > TILE && BYTES > 16;
    return p.batch * p.length * p.channels * (long long)sizeof(T) > (predicted ? 1 << 21 : 1 << 17);
}

// Prefetches a tile to the L2 cache, because L1 takes few requests at a time. Always inlined: GCC drops calls of a
// function that only prefetches.
template <typename U>
static INLINE void fetch(const Problem<T>& p, const View<U>& view, const Place& place) {
    if (!view.at) return;
    U* at = corner(view, place, p.length, p.reverse);
    if (view.channel == 1) {
        const U* end = at + place.count;
        if ((uintptr_t(end) - 1) / 64 == (uintptr_t(at) - 1) / 64) return;  // same cache line as the previous block
        for (long long t = 0; t < place.steps; ++t) PREFETCH(at + t * view.time + place.count - 1);
    } else if (view.time == 1) {
        for (long long c = 0; c < place.count; ++c) {
            U* row = at + c * view.channel;
            for (long long t = 0; t < place.steps - 1; t += 64 / (long long)sizeof(T)) PREFETCH(row + t);
            PREFETCH(row + place.steps - 1);  // most pieces begin within a cache line
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

// Q neighbours in memory of each of W channels: as Q vectors of channels, and back.
#if defined(SINGLE) && BYTES == 64
static INLINE void load_across(const T* from, long long channel, Lanes* to) {
    __m512 rows[4];
    UNROLL for (int i = 0; i < 4; ++i) {
        const T* at = from + i * channel;
        rows[i] = _mm512_castps128_ps512(_mm_loadu_ps(at));
        rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps(at + 4 * channel), 1);
        rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps(at + 8 * channel), 2);
        rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps(at + 12 * channel), 3);
    }
    const __m512 a = _mm512_unpacklo_ps(rows[0], rows[1]), b = _mm512_unpackhi_ps(rows[0], rows[1]);
    const __m512 c = _mm512_unpacklo_ps(rows[2], rows[3]), d = _mm512_unpackhi_ps(rows[2], rows[3]);
    to[0] = (Lanes)_mm512_shuffle_ps(a, c, 0x44), to[1] = (Lanes)_mm512_shuffle_ps(a, c, 0xee);
    to[2] = (Lanes)_mm512_shuffle_ps(b, d, 0x44), to[3] = (Lanes)_mm512_shuffle_ps(b, d, 0xee);
}

static INLINE void store_across(T* to, long long channel, const Lanes* from) {
    const __m512 *rows = (const __m512*)from;
    const __m512 a = _mm512_unpacklo_ps(rows[0], rows[1]), b = _mm512_unpackhi_ps(rows[0], rows[1]);
    const __m512 c = _mm512_unpacklo_ps(rows[2], rows[3]), d = _mm512_unpackhi_ps(rows[2], rows[3]);
    const __m512 turned[] = {_mm512_shuffle_ps(a, c, 0x44), _mm512_shuffle_ps(a, c, 0xee),
                             _mm512_shuffle_ps(b, d, 0x44), _mm512_shuffle_ps(b, d, 0xee)};
    UNROLL for (int i = 0; i < 4; ++i) {
        T* at = to + i * channel;
        _mm_storeu_ps(at, _mm512_castps512_ps128(turned[i]));
        _mm_storeu_ps(at + 4 * channel, _mm512_extractf32x4_ps(turned[i], 1));
        _mm_storeu_ps(at + 8 * channel, _mm512_extractf32x4_ps(turned[i], 2));
        _mm_storeu_ps(at + 12 * channel, _mm512_extractf32x4_ps(turned[i], 3));
    }
}
#elif defined(SINGLE) && BYTES == 32
static INLINE void load_across(const T* from, long long channel, Lanes* to) {
    __m256 rows[4];
    UNROLL for (int i = 0; i < 4; ++i) {
        const __m256 low = _mm256_castps128_ps256(_mm_loadu_ps(from + i * channel));
        rows[i] = _mm256_insertf128_ps(low, _mm_loadu_ps(from + (i + 4) * channel), 1);
    }
    const __m256 a = _mm256_unpacklo_ps(rows[0], rows[1]), b = _mm256_unpackhi_ps(rows[0], rows[1]);
    const __m256 c = _mm256_unpacklo_ps(rows[2], rows[3]), d = _mm256_unpackhi_ps(rows[2], rows[3]);
    to[0] = (Lanes)_mm256_shuffle_ps(a, c, 0x44), to[1] = (Lanes)_mm256_shuffle_ps(a, c, 0xee);
    to[2] = (Lanes)_mm256_shuffle_ps(b, d, 0x44), to[3] = (Lanes)_mm256_shuffle_ps(b, d, 0xee);
}

static INLINE void store_across(T* to, long long channel, const Lanes* from) {
    const __m256* rows = (const __m256*)from;
    const __m256 a = _mm256_unpacklo_ps(rows[0], rows[1]), b = _mm256_unpackhi_ps(rows[0], rows[1]);
    const __m256 c = _mm256_unpacklo_ps(rows[2], rows[3]), d = _mm256_unpackhi_ps(rows[2], rows[3]);
    const __m256 turned[] = {_mm256_shuffle_ps(a, c, 0x44), _mm256_shuffle_ps(a, c, 0xee),
                             _mm256_shuffle_ps(b, d, 0x44), _mm256_shuffle_ps(b, d, 0xee)};
    UNROLL for (int i = 0; i < 4; ++i) {
        _mm_storeu_ps(to + i * channel, _mm256_castps256_ps128(turned[i]));
        _mm_storeu_ps(to + (i + 4) * channel, _mm256_extractf128_ps(turned[i], 1));
    }
}
#else
static INLINE void load_across(const T* from, long long channel, Lanes* to) {
    T rows[Q][W];
    UNROLL for (int c = 0; c < W; c += Q) {
        Quad quads[Q];
        UNROLL for (int i = 0; i < Q; ++i) memcpy(&quads[i], from + (c + i) * channel, sizeof(Quad));
        transpose(quads);
        UNROLL for (int i = 0; i < Q; ++i) memcpy(rows[i] + c, &quads[i], sizeof(Quad));
    }
    UNROLL for (int i = 0; i < Q; ++i) to[i] = load(rows[i]);
}

static INLINE void store_across(T* to, long long channel, const Lanes* from) {
    T rows[Q][W];
    UNROLL for (int i = 0; i < Q; ++i) store(rows[i], from[i]);
    UNROLL for (int c = 0; c < W; c += Q) {
        Quad quads[Q];
        UNROLL for (int i = 0; i < Q; ++i) memcpy(&quads[i], rows[i] + c, sizeof(Quad));
        transpose(quads);
        UNROLL for (int i = 0; i < Q; ++i) memcpy(to + (c + i) * channel, &quads[i], sizeof(Quad));
    }
}
#endif

// A tile whose times are contiguous, and which the forward transposes in registers.
template <typename U>
struct Columns {
    U* at;
    long long channel;
};

template <typename U>
static INLINE bool in_columns(const View<U>& view, const Place& place, bool reverse) {
    return view.time == 1 && view.channel != 1 && !reverse && place.count == W && place.steps >= TOGETHER;
}

template <typename U>
static INLINE Columns<U> columns_of(const View<U>& view, const Place& place) {
    return {corner(view, place, 0, false), view.channel};
}

// The first of TOGETHER times. The last of them overlap with those before, which are computed twice: rows do not depend
// on each other.
static INLINE long long together(long long t, long long steps) {
    return t + TOGETHER <= steps || steps < TOGETHER ? t : steps - TOGETHER;
}

// A tile shorter than that repeats its last row.
static INLINE void load_together(Rows<const T> rows, long long t, long long steps, Lanes* to) {
    UNROLL for (int j = 0; j < TOGETHER; ++j) to[j] = load(rows[least(t + j, steps - 1)]);
}

static INLINE void load_together(Columns<const T> columns, long long t, long long, Lanes* to) {
    UNROLL for (int j = 0; j < TOGETHER; j += Q) load_across(columns.at + t + j, columns.channel, to + j);
}

static INLINE void store_together(Rows<T> rows, long long t, long long steps, const Lanes* from) {
    UNROLL for (int j = 0; j < TOGETHER; ++j)
        if (t + j < steps) store(rows[t + j], from[j]);
}

static INLINE void store_together(Columns<T> columns, long long t, long long, const Lanes* from) {
    UNROLL for (int j = 0; j < TOGETHER; j += Q) store_across(columns.at + t + j, columns.channel, from + j);
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
