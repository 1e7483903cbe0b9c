/* Steps of LAMB, LANS and LARS over many tensors on a CPU, and norms. The equations are those of lamb.py, lans.py and lars.py.

   A tensor is split into stretches, and sums are taken stretch by stretch and added in order, in double: the result does not depend on the
   number of threads. Compiled by native.py, for float and for double. */

#include <math.h>

#define STRETCH 16384
#define LEAST_EPS 1e-37 /* as lamb.py has it */
#define STRETCHES(n) (((n) + STRETCH - 1) / STRETCH)
#define END(i, n) ((i) + STRETCH < (n) ? (i) + STRETCH : (n))

typedef struct { double x, first, second; } Sums; /* of squares: x and the directions */

/* A sum of squares of x, found in REAL: again in double where its squares may have been 0, without digits, or infinite. */
static double squares(double sum, long n, const REAL *x) {
    if (sum >= 1e-20 && sum <= 1e38) return sum;
    double exact = 0;
#pragma omp simd reduction(+ : exact)
    for (long i = 0; i < n; i++) exact += (double)x[i] * (double)x[i];
    return exact;
}

static REAL ratio(double a, double b) { return a > 0 && b > 0 ? (REAL)sqrt(a / b) : (REAL)1; }

/* One stretch of LAMB: moves the moments, writes u. row: new1, new2, correct1, correct2, lr, scale. */
static Sums lamb_directions(long n, const REAL *row, REAL eps, REAL decay, const REAL *restrict x, const REAL *restrict g,
                            REAL *restrict m, REAL *restrict v, REAL *restrict u_out) {
    const REAL new1 = row[0], new2 = row[1], correct1 = row[2], correct2 = row[3], scale = row[5];
    REAL xx = 0, uu = 0;
#pragma omp simd reduction(+ : xx, uu)
    for (long i = 0; i < n; i++) {
        REAL gi = g[i] * scale;
        m[i] += new1 * (gi - m[i]);
        v[i] += new2 * (gi * gi - v[i]);
        REAL u = m[i] * correct1 / (SQRT(v[i] * correct2) + eps) + decay * x[i];
        u_out[i] = u;
        xx += x[i] * x[i];
        uu += u * u;
    }
    return (Sums){squares(xx, n, x), squares(uu, n, u_out), 0};
}

/* One stretch of LANS: moves the moments, writes r and c. The row is LAMB's. */
static Sums lans_directions(long n, const REAL *row, REAL eps, REAL decay, const REAL *restrict x, const REAL *restrict g,
                            REAL *restrict m, REAL *restrict v, REAL *restrict r_out, REAL *restrict c_out) {
    const REAL new1 = row[0], new2 = row[1], correct1 = row[2], correct2 = row[3], scale = row[5];
    REAL xx = 0, rr = 0, cc = 0;
#pragma omp simd reduction(+ : xx, rr, cc)
    for (long i = 0; i < n; i++) {
        REAL gi = g[i] * scale;
        m[i] += new1 * (gi - m[i]);
        v[i] += new2 * (gi * gi - v[i]);
        REAL d = SQRT(v[i] * correct2) + eps;
        REAL r = m[i] * correct1 / d + decay * x[i], c = gi / d + decay * x[i];
        r_out[i] = r;
        c_out[i] = c;
        xx += x[i] * x[i];
        rr += r * r;
        cc += c * c;
    }
    return (Sums){squares(xx, n, x), squares(rr, n, r_out), squares(cc, n, c_out)};
}

/* One stretch of LARS, whole: how far to go is known beforehand. row: keep, inside, outside, trust, scale. */
static void lars_stretch(long n, const REAL *row, REAL momentum, REAL decay, int nesterov, REAL *restrict x, const REAL *restrict g,
                         REAL *restrict v) {
    const REAL keep = row[0], inside = row[1], outside = row[2], scale = row[4];
    const REAL old = nesterov ? momentum : 1, new = nesterov ? 1 : 0;
#pragma omp simd
    for (long i = 0; i < n; i++) {
        REAL d = (g[i] * scale + decay * x[i]) * inside;
        v[i] = keep * v[i] + d;
        x[i] -= outside * (new * d + old * v[i]);
    }
}

static Sums directions(int lans, long n, const REAL *row, REAL eps, REAL decay, REAL *x, REAL *g, REAL *m, REAL *v, REAL *u, REAL *w) {
    if (eps < LEAST_EPS && row[0] == 0) eps = 1; /* left alone: 0/0 is NaN, also at a rate of 0 */
    return lans ? lans_directions(n, row, eps, decay, x, g, m, v, u, w) : lamb_directions(n, row, eps, decay, x, g, m, v, u);
}

static void apply(int lans, long n, REAL *restrict x, const REAL *restrict u, const REAL *restrict w, REAL rate, REAL rate2) {
    if (lans) {
#pragma omp simd
        for (long i = 0; i < n; i++) x[i] -= rate * u[i] + rate2 * w[i];
    } else {
#pragma omp simd
        for (long i = 0; i < n; i++) x[i] -= rate * u[i];
    }
}

/* The rates of the directions, and the trust ratio that is reported. beta1 is LANS's; clip bounds LAMB's ratio. */
static REAL rates(int lans, int adapt, REAL lr, REAL beta1, REAL clip, Sums s, REAL *rate, REAL *rate2) {
    REAL trust = adapt ? ratio(s.x, s.first) : 1, trust2 = adapt && lans ? ratio(s.x, s.second) : 1;
    if (adapt && !lans && trust > clip) trust = clip;
    *rate = lr * trust * (lans ? beta1 : 1);
    *rate2 = lans ? lr * trust2 * (1 - beta1) : 0;
    return trust;
}

/* LAMB or LANS on `count` tensors. rows: 6 numbers a tensor. scratch: twice the longest tensor. sums: as many as its stretches. */
void adaptive(int lans, long count, const long *sizes, REAL **x, REAL **g, REAL **m, REAL **v, const REAL *rows, int adapt, REAL eps,
              REAL decay, REAL beta1, REAL clip, REAL *scratch, long longest, Sums *sums, REAL *trust) {
#pragma omp parallel
    {
        /* Short tensors whole, one to a thread; their directions stay in its cache. */
        REAL u[STRETCH], w[STRETCH], rate, rate2;
#pragma omp for schedule(dynamic) nowait
        for (long t = 0; t < count; t++) {
            if (sizes[t] > STRETCH) continue;
            Sums s = directions(lans, sizes[t], rows + 6 * t, eps, decay, x[t], g[t], m[t], v[t], u, w);
            trust[t] = rates(lans, adapt, rows[6 * t + 4], beta1, clip, s, &rate, &rate2);
            apply(lans, sizes[t], x[t], u, w, rate, rate2);
        }
        /* Long ones one after the other, by all threads. */
        for (long t = 0; t < count; t++) {
            const long n = sizes[t];
            if (n <= STRETCH) continue;
#pragma omp for schedule(static)
            for (long k = 0; k < STRETCHES(n); k++) {
                const long i = k * STRETCH;
                sums[k] = directions(lans, END(i, n) - i, rows + 6 * t, eps, decay, x[t] + i, g[t] + i, m[t] + i, v[t] + i, scratch + i,
                                     scratch + longest + i);
            }
            Sums s = {0, 0, 0};
            for (long k = 0; k < STRETCHES(n); k++) {
                s.x += sums[k].x;
                s.first += sums[k].first;
                s.second += sums[k].second;
            }
            const REAL found = rates(lans, adapt, rows[6 * t + 4], beta1, clip, s, &rate, &rate2);
#pragma omp single nowait
            trust[t] = found;
#pragma omp for schedule(static)
            for (long k = 0; k < STRETCHES(n); k++) {
                const long i = k * STRETCH;
                apply(lans, END(i, n) - i, x[t] + i, scratch + i, scratch + longest + i, rate, rate2);
            }
        }
    }
}

/* LARS on `count` tensors. rows: 5 numbers a tensor. */
void lars(long count, const long *sizes, REAL **x, REAL **g, REAL **v, const REAL *rows, REAL momentum, REAL decay, int nesterov) {
#pragma omp parallel
    for (long t = 0; t < count; t++) {
#pragma omp for schedule(static) nowait
        for (long i = 0; i < sizes[t]; i += STRETCH)
            lars_stretch(END(i, sizes[t]) - i, rows + 5 * t, momentum, decay, nesterov, x[t] + i, g[t] + i, v[t] + i);
    }
}

/* L2 norms of `count` tensors. sums: a number for each stretch of all of them. */
void norms(long count, const long *sizes, REAL **x, double *sums, REAL *result) {
#pragma omp parallel
    {
        long first = 0;
        for (long t = 0; t < count; first += STRETCHES(sizes[t]), t++) {
#pragma omp for schedule(static) nowait
            for (long k = 0; k < STRETCHES(sizes[t]); k++) {
                const long i = k * STRETCH, n = END(i, sizes[t]) - i;
                const REAL *part = x[t] + i;
                REAL sum = 0;
#pragma omp simd reduction(+ : sum)
                for (long j = 0; j < n; j++) sum += part[j] * part[j];
                sums[first + k] = squares(sum, n, part);
            }
        }
    }
    for (long t = 0, first = 0; t < count; first += STRETCHES(sizes[t]), t++) {
        double sum = 0;
        for (long k = 0; k < STRETCHES(sizes[t]); k++) sum += sums[first + k];
        result[t] = (REAL)sqrt(sum);
    }
}
