// A vector of W channels and its elementary functions, for one number type and one instruction set.
//
// Included several times, each time inside another namespace, with T (the number type), SINGLE (defined for float) and
// BYTES (the size of a vector; 0 for compilers without vector types, where a vector is one number). Nothing from the
// standard library's templates is used here: such a template compiled for a wide instruction set could be shared with
// code for narrower machines.

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
static const T MOST_POWER = T(125), OVERFLOW_POWER = T(128);  // beyond 2^+-125 the exponent may not fit
static const T LEAST_EXP = T(-87), MOST_EXP = T(88);          // exp of less is taken for zero
static const T LN2_HIGH = T(0.693359375), LN2_LOW = T(-2.12194440054690583e-4);  // k LN2_HIGH is exact
#else
static const int MANTISSA = 52;
static const T MAGIC = T(6755399441055744);  // 1.5 * 2^52
static const T MOST_POWER = T(1020), OVERFLOW_POWER = T(1024);
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

// 2^r for |r| <= 1/2; exactly 1 at 0, so that decays next to 1 keep their digits.
static INLINE Lanes root(Lanes r) {
#ifdef SINGLE
    Lanes p = r * T(0.0013264780814253337922) + T(0.0096714834017475160373);  // off by at most 1.5 * 2^-24
    p = p * r + T(0.055507331867619496606);
    p = p * r + T(0.24022242715250068014);
    p = p * r + T(0.69314697848682896901);
#else
    Lanes p = r * T(4.434771323289414699e-10) + T(7.0737728563462922475e-9);
    p = p * r + T(1.017819946976944096e-7);
    p = p * r + T(1.3215435348585085201e-6);
    p = p * r + T(1.5252733493730651197e-5);
    p = p * r + T(1.5403530456963975989e-4);
    p = p * r + T(1.333355814677340704e-3);
    p = p * r + T(9.618129107594254198e-3);
    p = p * r + T(5.5504108664820092621e-2);
    p = p * r + T(0.24022650695910130862);
    p = p * r + T(0.69314718055994532559);
#endif
    return p * r + T(1);
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

// 2^(a b). The short form is for |a b| <= MOST_POWER; the other takes everything and gives the same bits there.
template <bool SHORT>
static INLINE Lanes power(Lanes a, Lanes b) {
    const Lanes product = a * b, shifted = product + MAGIC, k = shifted - MAGIC;
    const Lanes value = times_power(root(product - k), shifted);
    if (SHORT) return value;
    const Lanes low = product < -MOST_POWER ? Lanes{} : value;
    const Lanes high = product >= OVERFLOW_POWER ? splat(T(HUGE_VAL)) : low;
    return product == product ? high : product;
}

// exp(x) with all its digits, also where x is large; zero below LEAST_EXP.
static INLINE Lanes exponential(Lanes x) {
    const Lanes bounded = x > MOST_EXP ? splat(MOST_EXP) : x;
    const Lanes shifted = bounded * LOG2E + MAGIC, k = shifted - MAGIC;
    const Lanes r = (bounded - k * LN2_HIGH) - k * LN2_LOW;
    const Lanes value = x < LEAST_EXP ? Lanes{} : times_power(root(r * LOG2E), shifted);
    return x == x ? value : x;
}

// log(1 + y) for 0 <= y <= 1, by 2 atanh(y / (2 + y)): small y keep their digits.
static INLINE Lanes log_1_plus(Lanes y) {
    const Lanes w = y / (y + T(2)), s = w * w;
#ifdef SINGLE
    Lanes p = s * T(0.28011986173015183171) + T(0.2800180541855029912);
    p = p * s + T(0.40021527229128519769);
    p = p * s + T(0.6666641628588369497);
#else
    Lanes p = s * T(0.17009755783290393411) + T(0.083449716189457225672);
    p = p * s + T(0.12104944977745759157);
    p = p * s + T(0.13301121352879017218);
    p = p * s + T(0.15386548396396309856);
    p = p * s + T(0.1818174447879195002);
    p = p * s + T(0.22222223953658580746);
    p = p * s + T(0.28571428548117717071);
    p = p * s + T(0.40000000000155119514);
    p = p * s + T(0.66666666666666309687);
#endif
    return p * s * w + (w + w);
}

struct Sigmoid {
    Lanes of, rest;  // 1 / (1 + exp(-x)), and what is missing to 1, both with all their digits
};

static INLINE Sigmoid sigmoid(Lanes x) {
    const Lanes y = exponential(-magnitude(x)), large = T(1) / (y + T(1)), small = y * large;
    return {x >= T(0) ? large : small, x >= T(0) ? small : large};
}

static INLINE Lanes softplus(Lanes x) {
    const Lanes above = x > T(0) ? x : Lanes{};
    const Lanes value = above + log_1_plus(exponential(-magnitude(x)));
    return x > T(20) ? x : value;  // PyTorch's softplus: linear from there
}

static INLINE Lanes softplus_slope(Lanes x) {
    const Lanes slope = sigmoid(x).of;
    return x > T(20) ? splat(T(1)) : slope;
}
