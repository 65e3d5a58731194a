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
static const T MOST_POWER = T(125), MOST_K = T(128);  // beyond 2^+-125 the exponent can overflow
static const T LEAST_EXP = T(-87), MOST_EXP = T(88);  // below LEAST_EXP, exp is zero
static const T LOG2E_REST = T(1.9259629911266175e-8);  // log2(e) without its first 24 bits
static const T LN2_HIGH = T(0.693359375), LN2_LOW = T(-2.12194440054690583e-4);  // k LN2_HIGH is exact
#else
static const int MANTISSA = 52;
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
#if BYTES == 64 && defined(SINGLE)
    return _mm512_movepi32_mask((__m512i)mask) == 0xffff;
#elif BYTES == 64
    return _mm512_movepi64_mask((__m512i)mask) == 0xff;
#elif BYTES == 32 && defined(SINGLE)
    return _mm256_movemask_ps((__m256)mask) == 0xff;
#elif BYTES == 32
    return _mm256_movemask_pd((__m256d)mask) == 0xf;
#elif BYTES
    Mask every = mask;
    for (int i = 1; i < W; ++i) every[0] &= mask[i];
    return every[0] != 0;
#else
    return mask;
#endif
}

static INLINE Lanes magnitude(Lanes x) {
    Bits bits;
    memcpy(&bits, &x, sizeof(bits));
    bits &= ~Bits{} >> 1;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// The larger and the smaller of both; b if one is NaN.
static INLINE Lanes larger(Lanes a, Lanes b) {
#if BYTES == 64 && defined(SINGLE)
    return (Lanes)_mm512_max_ps((__m512)a, (__m512)b);
#elif BYTES == 32 && defined(SINGLE)
    return (Lanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

static INLINE Lanes smaller(Lanes a, Lanes b) {
#if BYTES == 64 && defined(SINGLE)
    return (Lanes)_mm512_min_ps((__m512)a, (__m512)b);
#elif BYTES == 32 && defined(SINGLE)
    return (Lanes)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

// a b + c, rounded once where the processor can. On its own, Clang fuses a product and a sum only if nothing else uses
// the product.
static INLINE Lanes fused(Lanes a, Lanes b, Lanes c) {
#if BYTES == 64 && defined(SINGLE)
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif BYTES == 64
    return (Lanes)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif BYTES == 32 && defined(SINGLE)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif BYTES == 32
    return (Lanes)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif BYTES && defined(__aarch64__) && defined(SINGLE)
    return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif BYTES && defined(__aarch64__)
    return (Lanes)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
    return a * b + c;
#endif
}

// A power 2^(k + r) is the product of 2^k, with k a multiple of 1 / PARTS, and a polynomial of the rest r. With the powers
// of 2^(1 / PARTS) in one or two registers, a short polynomial is enough. An entry lacks the fraction of k as it stands in
// `shifted`: adding all of k to the exponent puts it back. Without such a table, k is an integer.
#if defined(SINGLE) && BYTES == 64
#define TABLE
static const int PARTS = 32, PART_BITS = 5;
alignas(64) static const uint32_t PART[] = {
    0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
    0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
    0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
    0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3};
static INLINE Lanes part(Bits k) {
    return (Lanes)_mm512_permutex2var_ps(_mm512_load_ps(PART), (__m512i)k, _mm512_load_ps(PART + 16));
}
#elif defined(SINGLE) && BYTES == 32
#define TABLE
static const int PARTS = 8, PART_BITS = 3;
alignas(64) static const uint32_t PART[] = {
    0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
static INLINE Lanes part(Bits k) {
    return (Lanes)_mm256_permutevar8x32_ps(_mm256_load_ps((const float*)PART), (__m256i)k);
}
#else
static const int PARTS = 1, PART_BITS = 0;
#endif
// Adding MAGIC rounds to the nearest multiple of 1 / PARTS, which is then in the low bits.
static const T MAGIC = T(3ll << (MANTISSA - 1 - PART_BITS));

// The coefficients of r, r^2, ... in 2^r for |r| <= 1 / (2 PARTS). The constant is exactly 1, so that decays next to 1
// keep their digits. In single precision they are off by at most 1.5, 0.5 and 0.9 times 2^-24.
#ifndef SINGLE
static const T ROOT[] = {T(0.69314718055994532559), T(0.24022650695910130862), T(5.5504108664820092621e-2),
                         T(9.618129107594254198e-3), T(1.333355814677340704e-3), T(1.5403530456963975989e-4),
                         T(1.5252733493730651197e-5), T(1.3215435348585085201e-6), T(1.017819946976944096e-7),
                         T(7.0737728563462922475e-9), T(4.434771323289414699e-10)};
#elif !defined(TABLE)
static const T ROOT[] = {T(0.69314697848682896901), T(0.24022242715250068014), T(0.055507331867619496606),
                         T(0.0096714834017475160373), T(0.0013264780814253337922)};
#elif BYTES == 32
static const T ROOT[] = {T(0.69314721426027071), T(0.24025762978408574), T(0.055496221793381005)};
#else
static const T ROOT[] = {T(0.6931573297733595), T(0.24022649737376855)};
#endif
static const int DEGREE = sizeof(ROOT) / sizeof(T);

// The powers take one vector each. Calls for other vectors do not depend on it, so the processor overlaps them; a function
// of several would need more registers than AVX2 has.

// 2^(k + r), where `shifted` is k + MAGIC.
static INLINE Lanes raise(Lanes r, Lanes shifted) {
    Lanes root = r * ROOT[DEGREE - 1] + ROOT[DEGREE - 2];
    UNROLL for (int i = DEGREE - 3; i >= 0; --i) root = root * r + ROOT[i];
    Bits k, bits;
    memcpy(&k, &shifted, sizeof(k));
#ifdef TABLE
    Lanes power = part(k);
#else
    Lanes power = root * r + T(1);
#endif
    memcpy(&bits, &power, sizeof(bits));
    bits += k << (MANTISSA - PART_BITS);  // k goes to the exponent by an integer addition
    memcpy(&power, &bits, sizeof(bits));
#ifdef TABLE
    power += power * (root * r);
#endif
    return power;
}

// 2^(a b). The short form needs |a b| <= MOST_POWER; the other takes any value and gives the same bits in that range.
template <bool SHORT>
static INLINE Lanes power(Lanes a, Lanes b) {
    const Lanes shifted = fused(a, b, splat(MAGIC)), k = shifted - MAGIC, r = fused(a, b, -k);
    if (SHORT) return raise(r, shifted);
    const Lanes half = k > T(0) ? splat(T(1)) : Lanes{};
    Lanes to = raise(r, shifted - half);  // half of a large power, because 2^k alone can overflow
    to += to * half;
    to = k < -MOST_POWER ? Lanes{} : to;
    to = (k > MOST_K) | ((k == MOST_K) & (r >= T(0))) ? splat(T(HUGE_VAL)) : to;
    return k == k ? to : k;
}

// Each function below takes COUNT vectors, one stage after the other. In one vector so many operations depend on each
// other that the processor cannot look far enough ahead to overlap them with those of the next.
#define EACH UNROLL for (int j = 0; j < COUNT; ++j)

// exp(x) to full accuracy for LEAST_EXP <= x <= MOST_EXP.
template <int COUNT>
static INLINE void exponentials(Lanes* x) {
    Lanes shifted[COUNT], k[COUNT];
    EACH shifted[j] = x[j] * LOG2E + MAGIC;
    EACH k[j] = shifted[j] - MAGIC;
#ifdef TABLE  // such a processor fuses: x log2(e) - k has all its digits
    EACH x[j] = fused(x[j], splat(LOG2E), -k[j]) + x[j] * LOG2E_REST;
    EACH x[j] = raise(x[j], shifted[j]);
#else
    EACH {
        const Lanes found = raise(((x[j] - k[j] * LN2_HIGH) - k[j] * LN2_LOW) * LOG2E, shifted[j]);
        x[j] = x[j] == x[j] ? found : x[j];  // the addition to the exponent can make NaN a number
    }
#endif
}

// x / (1 + exp(-x)): the gate, x times its sigmoid. Below LEAST_EXP it stays at its value there, which
// is -1.4e-36 in single precision.
template <int COUNT>
static INLINE void gate(Lanes* x) {
    Lanes y[COUNT];
    EACH x[j] = larger(splat(LEAST_EXP), x[j]);
    EACH y[j] = -smaller(splat(-LEAST_EXP), x[j]);
    exponentials<COUNT>(y);
    EACH x[j] /= y[j] + T(1);
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

// PyTorch's softplus, log(1 + exp(x)), which is linear above 20, and with SLOPE its derivative.
template <int COUNT, bool SLOPE>
static INLINE void softplus(Lanes* x, Lanes* slope) {
    Lanes y[COUNT], w[COUNT], s[COUNT], sum[COUNT];
    EACH y[j] = larger(splat(LEAST_EXP), -magnitude(x[j]));
    exponentials<COUNT>(y);
    EACH w[j] = y[j] / (y[j] + T(2));
    EACH s[j] = w[j] * w[j];
    EACH sum[j] = s[j] * LOGARITHM[TERMS - 1] + LOGARITHM[TERMS - 2];
    UNROLL for (int i = TERMS - 3; i >= 0; --i) EACH sum[j] = sum[j] * s[j] + LOGARITHM[i];
    EACH sum[j] = sum[j] * s[j] * w[j] + (w[j] + w[j]) + larger(x[j], Lanes{});
#ifndef SINGLE
    EACH sum[j] = x[j] > T(20) ? x[j] : sum[j];  // in single precision, what is added is less than half a unit
#endif
    if (SLOPE) {
        EACH slope[j] = (x[j] > T(0) ? splat(T(1)) : y[j]) / (y[j] + T(1));
        EACH slope[j] = x[j] > T(20) ? splat(T(1)) : slope[j];
    }
    EACH x[j] = sum[j];
}
#undef EACH

// exp(x) to full accuracy for x <= MOST_EXP; zero below LEAST_EXP.
static INLINE Lanes exponential(Lanes x) {
    Lanes y = x;
    exponentials<1>(&y);
    return x < LEAST_EXP ? Lanes{} : y;
}

// 1 / (1 + exp(-x)) and 1 minus it, both to full accuracy.
static INLINE Lanes sigmoid(Lanes x, Lanes& rest) {
    const Lanes y = exponential(-magnitude(x)), large = T(1) / (y + T(1)), small = y * large;
    rest = x > T(0) ? small : large;
    return x > T(0) ? large : small;
}
#undef TABLE
