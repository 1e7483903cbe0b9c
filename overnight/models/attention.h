/* What the two forms of attention share: which weights are dropped, and how gradients are given back. Includes activations.h before it. */

static inline long least(long a, long b) { return a < b ? a : b; }

/* Two words for row i of a head, by which its weights are dropped (the mixer of SplitMix64, Steele et al. 2014). */
static inline uint64_t row_key(uint64_t seed, long head, long i) {
    uint64_t x = seed + 0x9e3779b97f4a7c15u * (((uint64_t)head << 32) + (uint64_t)i + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Uniform signed 32 bits for place j of a row, by the halves of its key. */
static inline int32_t bits(uint32_t low, uint32_t high, long j) {
    uint32_t x = (uint32_t)j ^ low;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= high;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return (int32_t)(x ^ (x >> 16));
}

/* The inverse: rows of a gradient times a factor, turned back. */
static void give(long T, long E, long wide, const float *from, float factor, const float *cos, const float *sin, STORE *to, long stride) {
    long half = E / 2;
    for (long t = 0; t < T; t++, from += wide, to += stride) {
        if (cos) {
            const float *restrict c = cos + t * half, *restrict s = sin + t * half;
            for (long j = 0; j < half; j++) {
                float x = from[j] * factor, y = from[half + j] * factor;
                to[j] = store(x * c[j] + y * s[j]);
                to[half + j] = store(y * c[j] - x * s[j]);
            }
        } else
            for (long j = 0; j < E; j++) to[j] = store(from[j] * factor);
    }
}

static inline float *part(float **memory, long floats) {
    float *at = *memory;
    *memory += (floats + 15) / 16 * 16;
    return at;
}
