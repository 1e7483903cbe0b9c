/* What the C of this folder shares: how activations are stored, and an exponential that is computed in vectors. STORE: 16 bits for bf16, else REAL (float where it is not defined). */

#include <math.h>
#include <stdint.h>

#ifndef REAL
#define REAL float
#endif

#ifdef BF16
typedef uint16_t STORE;
static inline float load(STORE x) {
    union { uint32_t bits; float value; } v = {(uint32_t)x << 16};
    return v.value;
}
/* To the nearest, ties to even; NaN stays NaN. */
static inline STORE store(float x) {
    union { float value; uint32_t bits; } v = {x};
    uint32_t rounded = (v.bits + 0x7fffu + ((v.bits >> 16) & 1u)) >> 16;
    return x == x ? (STORE)rounded : (STORE)0x7fc0u;
}
#else
typedef REAL STORE;
static inline REAL load(STORE x) { return x; }
static inline STORE store(REAL x) { return x; }
#endif

/* Rows are functions of their own: in the middle of a parallel loop gcc computes them number by number. */
#define ROW static __attribute__((noinline))

/* e^x to 2e-7 of its value, 0 below -87, for x of at most 0: x = n ln 2 + r, the Taylor series of e^r, and 2^n by its bits. */
static inline float exp_(float x) {
    float n = rintf((x < -87.0f ? -87.0f : x) * 1.44269504f), r = ((x < -87.0f ? -87.0f : x) - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { uint32_t bits; float value; } two = {(uint32_t)((int32_t)n + 127) << 23};
    return x < -87.0f ? 0.0f : x == x ? two.value * p : x;
}

/* The normal distribution function to 8e-8 (Abramowitz and Stegun 7.1.26), and e^(-x²/2). */
static inline float normal(float x, float *bell) {
    float z = fabsf(x) * 0.70710678f, e = exp_(-z * z), t = 1.0f / (1.0f + 0.3275911f * z);
    float tail = 0.5f * e * t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    *bell = e;
    return x < 0 ? tail : 1.0f - tail;
}
