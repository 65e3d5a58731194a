// A vector of W channels and its elementary functions, for one number type and one instruction set.
//
// Included several times, each time inside another namespace, with T (the number type), SINGLE (defined for float) and
// BYTES (the size of a vector; 0 for compilers without vector types, where a vector is one number). It uses no templates
// of the standard library: one compiled for a wide instruction set could be shared with code for narrower machines.

#if BYTES
static const int W = BYTES / sizeof(T);
typedef T Lanes __attribute__((vector_size(BYTES)));
#ifdef SINGLE
typedef uint32_t Bits __attribute__((vector_size(BYTES)));
typedef int32_t Mask __attribute__((vector_size(BYTES)));
#else
typedef uint64_t Bits __attribute__((vector_size(BYTES)));
typedef int64_t Mask __attribute__((vector_size(BYTES)));
#endif
#else
static const int W = 1;
typedef T Lanes;
#ifdef SINGLE
typedef uint32_t Bits;
#else
typedef uint64_t Bits;
#endif
typedef bool Mask;
#endif

#ifdef SINGLE
static const int MANTISSA = 23;
static const T MAGIC = T(12582912);  // 1.5 * 2^23: adding it rounds to the nearest integer, which is then in the low bits
static const T MOST_POWER = T(125), MOST_K = T(128);  // beyond 2^+-125 the exponent can overflow
static const T LEAST_EXP = T(-87), MOST_EXP = T(88);          // below LEAST_EXP, exp is zero
static const T LN2_HIGH = T(0.693359375), LN2_LOW = T(-2.12194440054690583e-4);  // k LN2_HIGH is exact
#else
static const int MANTISSA = 52;
static const T MAGIC = T(6755399441055744);  // 1.5 * 2^52
static const T MOST_POWER = T(1020), MOST_K = T(1024);
static const T LEAST_EXP = T(-708), MOST_EXP = T(709);
static const T LN2_HIGH = T(6.93145751953125e-1), LN2_LOW = T(1.42860682030941723212e-6);
#endif
static const T LOG2E = T(1.4426950408889634074), LN2 = T(0.69314718055994530942);

static INLINE Lanes splat(T value) { return Lanes{} + value; }

static INLINE Lanes load(const T* from) {
    Lanes value;
    memcpy(&value, from, sizeof(value));
    return value;
}

static INLINE void store(T* to, Lanes value) { memcpy(to, &value, sizeof(value)); }

static INLINE bool all(Mask mask) {
#if BYTES
    Mask every = mask;
    for (int i = 1; i < W; ++i) every[0] &= mask[i];
    return every[0] != 0;
#else
    return mask;
#endif
}

static INLINE Lanes magnitude(Lanes x) { return x < T(0) ? -x : x; }

// The coefficients of r, r^2, ... in 2^r for |r| <= 1/2. The constant is exactly 1, so that decays next to 1 keep their
// digits.
#ifdef SINGLE
static const T ROOT[] = {T(0.69314697848682896901), T(0.24022242715250068014), T(0.055507331867619496606),
                         T(0.0096714834017475160373), T(0.0013264780814253337922)};  // off by at most 1.5 * 2^-24
#else
static const T ROOT[] = {T(0.69314718055994532559), T(0.24022650695910130862), T(5.5504108664820092621e-2),
                         T(9.618129107594254198e-3), T(1.333355814677340704e-3), T(1.5403530456963975989e-4),
                         T(1.5252733493730651197e-5), T(1.3215435348585085201e-6), T(1.017819946976944096e-7),
                         T(7.0737728563462922475e-9), T(4.434771323289414699e-10)};
#endif
static const int DEGREE = sizeof(ROOT) / sizeof(T);

// 2^r_j for |r_j| <= 1/2.
template <int G>
static INLINE void root(const Lanes* r, Lanes* to) {
    UNROLL for (int j = 0; j < G; ++j) to[j] = r[j] * ROOT[DEGREE - 1] + ROOT[DEGREE - 2];
    UNROLL for (int i = DEGREE - 3; i >= 0; --i)
        UNROLL for (int j = 0; j < G; ++j) to[j] = to[j] * r[j] + ROOT[i];
    UNROLL for (int j = 0; j < G; ++j) to[j] = to[j] * r[j] + T(1);
}

// value 2^k, where `shifted` is k + MAGIC: k goes to the exponent by an integer addition.
static INLINE Lanes times_power(Lanes value, Lanes shifted) {
    Bits bits, k;
    memcpy(&bits, &value, sizeof(bits));
    memcpy(&k, &shifted, sizeof(k));
    bits += k << MANTISSA;
    memcpy(&value, &bits, sizeof(bits));
    return value;
}

// 2^(a b_j) for G rates side by side: one alone is a long chain of dependent operations. The short form needs
// |a b_j| <= MOST_POWER; the other takes any value and gives the same bits in that range.
template <int G, bool SHORT>
static INLINE void powers(Lanes a, const Lanes* b, Lanes* to) {
    Lanes shifted[G], r[G];
    UNROLL for (int j = 0; j < G; ++j) shifted[j] = a * b[j] + MAGIC;
    UNROLL for (int j = 0; j < G; ++j) r[j] = a * b[j] - (shifted[j] - MAGIC);
    root<G>(r, to);
    UNROLL for (int j = 0; j < G; ++j) {
        to[j] = times_power(to[j], shifted[j]);
        if (SHORT) continue;
        const Lanes k = shifted[j] - MAGIC;  // not from the product, which is rounded before it enters r
        to[j] = k < -MOST_POWER ? Lanes{} : to[j];
        to[j] = (k > MOST_K) | ((k == MOST_K) & (r[j] >= T(0))) ? splat(T(HUGE_VAL)) : to[j];
        to[j] = k == k ? to[j] : k;
    }
}

// The functions below take K vectors, for the same reason.

// -|x|
static INLINE Lanes below_zero(Lanes x) { return x > T(0) ? -x : x; }

// exp(x_j) to full accuracy, also for large x_j; zero below LEAST_EXP.
template <int K>
static INLINE void exponentials(const Lanes* x, Lanes* to) {
    Lanes shifted[K], r[K];
    UNROLL for (int j = 0; j < K; ++j) {
        const Lanes bounded = x[j] > MOST_EXP ? splat(MOST_EXP) : x[j];
        shifted[j] = bounded * LOG2E + MAGIC;
        const Lanes k = shifted[j] - MAGIC;
        r[j] = ((bounded - k * LN2_HIGH) - k * LN2_LOW) * LOG2E;
    }
    root<K>(r, to);
    UNROLL for (int j = 0; j < K; ++j) {
        to[j] = x[j] < LEAST_EXP ? Lanes{} : times_power(to[j], shifted[j]);
        to[j] = x[j] == x[j] ? to[j] : x[j];
    }
}

// log(1 + y) for 0 <= y <= 1 is 2 atanh(w) with w = y / (2 + y): small y keep their digits. The coefficients of w^3, ...
#ifdef SINGLE
static const T LOGARITHM[] = {T(0.6666641628588369497), T(0.40021527229128519769), T(0.2800180541855029912),
                              T(0.28011986173015183171)};
#else
static const T LOGARITHM[] = {T(0.66666666666666309687), T(0.40000000000155119514), T(0.28571428548117717071),
                              T(0.22222223953658580746), T(0.1818174447879195002),  T(0.15386548396396309856),
                              T(0.13301121352879017218), T(0.12104944977745759157), T(0.083449716189457225672),
                              T(0.17009755783290393411)};
#endif
static const int TERMS = sizeof(LOGARITHM) / sizeof(T);

template <int K>
static INLINE void logs_1_plus(const Lanes* y, Lanes* to) {
    Lanes w[K], s[K];
    UNROLL for (int j = 0; j < K; ++j) w[j] = y[j] / (y[j] + T(2));
    UNROLL for (int j = 0; j < K; ++j) s[j] = w[j] * w[j];
    UNROLL for (int j = 0; j < K; ++j) to[j] = s[j] * LOGARITHM[TERMS - 1] + LOGARITHM[TERMS - 2];
    UNROLL for (int i = TERMS - 3; i >= 0; --i)
        UNROLL for (int j = 0; j < K; ++j) to[j] = to[j] * s[j] + LOGARITHM[i];
    UNROLL for (int j = 0; j < K; ++j) to[j] = to[j] * s[j] * w[j] + (w[j] + w[j]);
}

// 1 / (1 + exp(-x)) and 1 minus it, both to full accuracy.
template <int K>
static INLINE void sigmoids(const Lanes* x, Lanes* of, Lanes* rest) {
    Lanes negative[K], y[K];
    UNROLL for (int j = 0; j < K; ++j) negative[j] = below_zero(x[j]);
    exponentials<K>(negative, y);
    UNROLL for (int j = 0; j < K; ++j) {
        const Lanes large = T(1) / (y[j] + T(1)), small = y[j] * large;
        of[j] = x[j] > T(0) ? large : small;
        rest[j] = x[j] > T(0) ? small : large;
    }
}

// PyTorch's softplus, which is linear above 20, and with SLOPE its derivative.
template <int K, bool SLOPE>
static INLINE void softplus(const Lanes* x, Lanes* to, Lanes* slope) {
    Lanes negative[K], y[K];
    UNROLL for (int j = 0; j < K; ++j) negative[j] = below_zero(x[j]);
    exponentials<K>(negative, y);
    logs_1_plus<K>(y, to);
    UNROLL for (int j = 0; j < K; ++j) {
        to[j] += x[j] > T(0) ? x[j] : Lanes{};
        to[j] = x[j] > T(20) ? x[j] : to[j];
        if (SLOPE) {
            slope[j] = (x[j] > T(0) ? splat(T(1)) : y[j]) / (y[j] + T(1));
            slope[j] = x[j] > T(20) ? splat(T(1)) : slope[j];
        }
    }
}
