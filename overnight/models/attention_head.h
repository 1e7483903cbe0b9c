/* Attention of one head in one sequence, forward. Includes activations.h, attention.h and panels.h before it.

   Shapes: T tokens, H heads, E dimensions of a head. */

enum { BLOCK = 48 };

/* (T, E) rows in fp32, `stride` apart, times a factor, turned by the angles of their positions where cos is not NULL; columns up to `wide` are 0. */
static void take(long T, long E, long wide, const STORE *from, long stride, float factor, const float *cos, const float *sin, float *to) {
    long half = E / 2;
    for (long t = 0; t < T; t++, from += stride, to += wide) {
        if (cos) {
            const float *restrict c = cos + t * half, *restrict s = sin + t * half;
            for (long j = 0; j < half; j++) {
                float x = load(from[j]), y = load(from[half + j]);
                to[j] = (x * c[j] - y * s[j]) * factor;
                to[half + j] = (y * c[j] + x * s[j]) * factor;
            }
        } else
            for (long j = 0; j < E; j++) to[j] = load(from[j]) * factor;
        for (long j = E; j < wide; j++) to[j] = 0;
    }
}

/* Keys that the rows i0 to i0 + rows see: from a whole panel's first to *end. */
static long seen(long i0, long rows, long T, long before, long after, long *end) {
    *end = after < 0 ? T : least(T, i0 + rows + after);
    return before < 0 || i0 <= before ? 0 : (i0 - before) / NR * NR;
}

/* Columns of the panels that hold keys lo to hi. */
static long whole(long lo, long hi, long T) { return least((hi - lo + NR - 1) / NR * NR, up(T) - lo); }

/* Scores (BLOCK, wide) of some queries with the keys from lo to hi; -inf outside the window. */
static void scores(long rows, long E, long T, long i0, long lo, long hi, long before, long after, const float *q, long q_wide, const float *keys, float *x,
                   long wide) {
    product(rows, whole(lo, hi, T), E, q, q_wide, 1, keys + lo * E, NR * E, 0, x, wide, 0);
    for (long m = 0; m < rows; m++, x += wide) {
        if (before >= 0)
            for (long j = lo; j < least(hi, i0 + m - before); j++) x[j - lo] = -INFINITY;
        if (after >= 0)
            for (long j = i0 + m + after + 1; j < hi; j++) x[j - lo] = -INFINITY;
    }
}

/* e^(x - largest) in place of the scores x of a row; returns their sum, and its logarithm with the largest added. */
ROW float weights(long T, float *restrict x, float *logarithm) {
    float top = -INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
    for (long j = 0; j < T; j++) top = x[j] > top ? x[j] : top;
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < T; j++) {
        float e = exp_(x[j] - top);
        x[j] = e;
        sum += e;
    }
    *logarithm = top + logf(sum);
    return sum;
}

/* 0 in place of the dropped of the weights of a row, whose first is at place lo. */
ROW void drop(long T, long lo, uint64_t key, long dropped, float *restrict x) {
    int32_t least_kept = (int32_t)dropped;
#pragma omp simd
    for (long j = 0; j < T; j++) x[j] = bits((uint32_t)key, (uint32_t)(key >> 32), lo + j) >= least_kept ? x[j] : 0.0f;
}

/* Memory for so many floats, of a size that is a multiple of its alignment, as C11 wants it; NULL where there is none. */
static float *floats(long n) { return aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64); }

/* Floats of the memory that `head_forward` works in. */
static long head_memory(long longest, long E) { return 3 * up(longest) * up(E) + BLOCK * (up(longest) + 2 * up(E)) + 256; }

/* out (T, E), its rows `out_row` apart, from queries, keys and values (T, E), `row` apart, which are H·E apart. longest: at least T. cos, sin: (T, E/2), or
   NULL. head, seed, dropped, kept, before, after: as of `attend`. sums: of each row, H apart, or NULL. */
static void head_forward(long T, long E, long H, long longest, const STORE *qkv, long row, const float *cos, const float *sin, long before, long after,
                         uint64_t seed, long head, long dropped, float kept, STORE *out, long out_row, float *sums, float *memory) {
    long wide = up(E), most = up(longest);
    float *plain = part(&memory, most * wide), *keys = part(&memory, most * wide), *copy = part(&memory, most * wide);
    float *q = part(&memory, BLOCK * wide), *o = part(&memory, BLOCK * wide), *x = part(&memory, BLOCK * most);
    take(T, E, wide, qkv + H * E, row, 1, cos, sin, plain);
    transposed(T, E, wide, plain, keys);
    take(T, E, wide, qkv + 2 * H * E, row, 1, 0, 0, plain);
    const float *values = panels(T, wide, plain, copy);
    for (long i0 = 0; i0 < T; i0 += BLOCK) {
        long rows = least(BLOCK, T - i0), hi, lo = seen(i0, rows, T, before, after, &hi), many = hi - lo;
        take(rows, E, wide, qkv + i0 * row, row, 1 / sqrtf((float)E), cos ? cos + i0 * (E / 2) : 0, cos ? sin + i0 * (E / 2) : 0, q);
        scores(rows, E, T, i0, lo, hi, before, after, q, wide, keys, x, most);
        float inverse[BLOCK], logarithm;
        for (long m = 0; m < rows; m++) {
            inverse[m] = kept / weights(many, x + m * most, sums ? sums + (i0 + m) * H : &logarithm);
            if (dropped > INT32_MIN) drop(many, lo, row_key(seed, head, i0 + m), dropped, x + m * most);
        }
        product(rows, wide, many, x, most, 1, values, T * NR, lo, o, wide, 0);
        for (long m = 0; m < rows; m++) {
            STORE *restrict to = out + (i0 + m) * out_row;
            for (long e = 0; e < E; e++) to[e] = store(o[m * wide + e] * inverse[m]);
        }
    }
}
