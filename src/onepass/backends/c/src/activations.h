/* Activations and their derivatives, one vector at a time, and the loops that apply them.

   The backward starts with the derivative of the activation, or with x_hat from y. Both are here. */
#pragma once
#include "numbers.h"

static inline FloatVector select_lanes(BitsVector where, FloatVector a, FloatVector b) {
    return (FloatVector)((where & (BitsVector)a) | (~where & (BitsVector)b));
}

/* x, but at least or at most `limit`. NaN stays NaN. */
#if defined(__AVX512F__)
static inline FloatVector clamp_min(FloatVector x, float limit) { return (FloatVector)_mm512_max_ps(_mm512_set1_ps(limit), (__m512)x); }
static inline FloatVector clamp_max(FloatVector x, float limit) { return (FloatVector)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)x); }
#elif defined(__AVX__)
static inline FloatVector clamp_min(FloatVector x, float limit) { return (FloatVector)_mm256_max_ps(_mm256_set1_ps(limit), (__m256)x); }
static inline FloatVector clamp_max(FloatVector x, float limit) { return (FloatVector)_mm256_min_ps(_mm256_set1_ps(limit), (__m256)x); }
#else
static inline FloatVector clamp_min(FloatVector x, float limit) {
    return select_lanes((BitsVector)(x < limit), (FloatVector){0} + limit, x);
}
static inline FloatVector clamp_max(FloatVector x, float limit) {
    return select_lanes((BitsVector)(x > limit), (FloatVector){0} + limit, x);
}
#endif

/* exp, accurate to 1 ulp; 0 below -87.3 and infinity above 88.7.
   Adding 1.5·2^23 rounds x/ln 2 to an integer k, and exp x = 2^k·exp(x - k·ln 2). Fast-math would remove that step. */
static inline FloatVector exponential(FloatVector x) {
    x = clamp_max(clamp_min(x, -88.0f), 89.0f);
    FloatVector shifted = x * 1.44269504f + 12582912.0f, k = shifted - 12582912.0f;
    FloatVector r = x - k * 0.693359375f + k * 2.12194440e-4f;
    FloatVector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (FloatVector)(((BitsVector)shifted + 127u) << 23);
}

static inline FloatVector sigmoid(FloatVector z) { return 1.0f / (1.0f + exponential(-z)); }

/* The cumulative normal distribution Φ(z). It also returns exp(-z²/2), which Φ needs. Let v = |z|/√2.
   For v < 1, Φ = 1/2 + erf(z/√2)/2 with erf v = v·p(v²).
   Otherwise Φ(-|z|) = erfc(v)/2 with erfc(v)·exp(v²) = t·q(t) and t = 1/(1 + 0.4v).
   The polynomials p and q are fitted; their relative errors are 1e-9 and 9e-8. */
static inline FloatVector normal_cdf(FloatVector z, FloatVector *gaussian) {
    FloatVector v = (FloatVector)((BitsVector)z & 0x7fffffffu) * 0.70710678f, t = 1.0f / (1.0f + 0.4f * v), s = v * v;
    FloatVector q = t * 0.04596281424164772f - 0.16303355991840363f;
    q = q * t + 0.13044635951519012f;
    q = q * t + 0.035491082817316055f;
    q = q * t + 0.11543142050504684f;
    q = q * t + 0.17849509418010712f;
    q = q * t + 0.20560678839683533f;
    q = q * t + 0.22593723237514496f;
    q = q * t + 0.22566287219524384f;
    FloatVector p = s * 7.853859278839082e-05f - 0.0008010193123482168f;
    p = p * s + 0.005188327748328447f;
    p = p * s - 0.026853810995817184f;
    p = p * s + 0.1128358542919159f;
    p = p * s - 0.3761262595653534f;
    p = p * s + 1.1283791065216064f;
    *gaussian = exponential(-0.5f * z * z);
    FloatVector tail = 0.5f * t * q * *gaussian, far = select_lanes((BitsVector)(z < 0.0f), tail, 1.0f - tail);
    return select_lanes((BitsVector)(v < 1.0f), 0.5f + z * (0.35355339f * p), far);
}

/* (1 + tanh(√(2/π)(z + 0.044715z³)))/2, computed as a sigmoid. `slope` is the derivative of the sigmoid's argument. */
static inline FloatVector tanh_gate(FloatVector z, FloatVector *slope) {
    FloatVector square = clamp_max(z * z, 1e6f); /* beyond this the gate is 0 or 1 */
    *slope = 1.5957691216f + 0.2140644488f * square;
    return sigmoid(z * (1.5957691216f + 0.0713548163f * square));
}

static inline FloatVector silu(FloatVector z) { return z * sigmoid(z); }
static inline FloatVector relu(FloatVector z) { return clamp_min(z, 0.0f); }
static inline FloatVector gelu(FloatVector z) { FloatVector gaussian; return z * normal_cdf(z, &gaussian); }
static inline FloatVector gelu_tanh(FloatVector z) { FloatVector slope; return z * tanh_gate(z, &slope); }

static inline FloatVector silu_derivative(FloatVector z) {
    FloatVector gate = sigmoid(z);
    return gate * (1.0f + z * (1.0f - gate));
}

static inline FloatVector relu_derivative(FloatVector z) {
    return select_lanes((BitsVector)(z <= 0.0f), (FloatVector){0}, (FloatVector){0} + 1.0f);
}

static inline FloatVector gelu_derivative(FloatVector z) {
    FloatVector gaussian, gate = normal_cdf(z, &gaussian);
    return gate + z * 0.39894228f * gaussian;
}

static inline FloatVector gelu_tanh_derivative(FloatVector z) {
    FloatVector slope, gate = tanh_gate(z, &slope);
    return gate + z * gate * (1.0f - gate) * slope;
}

/* The last vector of an array, which may be incomplete. Missing lanes are 0. */
static inline FloatVector read_partial_vector(const float *from, int64_t n) {
    FloatVector x = {0};
    memcpy(&x, from, (size_t)min(n, LANES) * 4);
    return x;
}

/* to[i] = FUNCTION(z[i]) for all i < n. */
#define APPLY_ACTIVATION(T, FUNCTION)                                                                  \
    do {                                                                                               \
        int64_t i = 0;                                                                                 \
        for (; i + LANES <= n; i += LANES) write_vector_##T(to + i, FUNCTION(read_vector_f32(z + i))); \
        if (i < n) {                                                                                   \
            T last[LANES];                                                                             \
            write_vector_##T(last, FUNCTION(read_partial_vector(z + i, n - i)));                       \
            memcpy(to + i, last, (size_t)(n - i) * sizeof(T));                                         \
        }                                                                                              \
    } while (0)

#define APPLY_IF_CHOSEN(NAME, FUNCTION, T) if (activation == NAME) APPLY_ACTIVATION(T, FUNCTION);

/* `to` and `z` may be the same memory. The activation is chosen outside the loop. */
#define DEFINE_ACTIVATE(T)                                                                \
    VECTOR_LOOP void activate_##T(T *to, const float *z, int64_t n, int64_t activation) { \
        ACTIVATIONS(APPLY_IF_CHOSEN, T)                                                   \
    }
DEFINE_ACTIVATE(f32)
DEFINE_ACTIVATE(bf16)
DEFINE_ACTIVATE(f16)

static void activate(void *to, int64_t index, const float *z, int64_t n, int64_t activation, int64_t type) {
    if (type == F32) activate_f32((float *)to + index, z, n, activation);
    else if (type == BF16) activate_bf16((uint16_t *)to + index, z, n, activation);
    else activate_f16((uint16_t *)to + index, z, n, activation);
}

/* dz = dy·act'(z), (32), where z = x_hat·gain + term and x_hat = (x - mean)·rstd.
   The macro Z computes z. READ is READ_WHOLE for full vectors and READ_PARTIAL for the last one. */
#define READ_WHOLE(array) read_vector_f32((array) + i)
#define READ_PARTIAL(array) read_partial_vector((array) + i, n - i)
#define ACTIVATION_BACKWARD(Z, DERIVATIVE)                                                                                \
    do {                                                                                                                  \
        int64_t i = 0;                                                                                                    \
        for (; i + LANES <= n; i += LANES) write_vector_f32(dz + i, read_vector_f32(dy + i) * DERIVATIVE(Z(READ_WHOLE))); \
        if (i < n) {                                                                                                      \
            FloatVector last = READ_PARTIAL(dy) * DERIVATIVE(Z(READ_PARTIAL));                                            \
            memcpy(dz + i, &last, (size_t)(n - i) * 4);                                                                   \
        }                                                                                                                 \
    } while (0)
#define BACKWARD_IF_CHOSEN(NAME, FUNCTION, Z) if (activation == NAME) ACTIVATION_BACKWARD(Z, FUNCTION##_derivative);
#define CHOOSE_ACTIVATION_BACKWARD(Z) ACTIVATIONS(BACKWARD_IF_CHOSEN, Z)

/* Row: mean and rstd are scalars. Uniform: gain and term are scalars, too. Columns: all four are arrays. */
#define Z_ROW(READ) ((READ(x) - mean) * rstd * READ(gain) + READ(term))
#define Z_UNIFORM(READ) ((READ(x) - mean) * rstd * gain + term)
#define Z_COLUMNS(READ) ((READ(x) - READ(mean)) * READ(rstd) * READ(gain) + READ(term))

VECTOR_LOOP void activation_backward(float *restrict dz, const float *restrict dy, const float *restrict x, float mean, float rstd,
                                     const float *restrict gain, const float *restrict term, int64_t n, int64_t activation) {
    CHOOSE_ACTIVATION_BACKWARD(Z_ROW)
}

VECTOR_LOOP void activation_backward_uniform(float *restrict dz, const float *restrict dy, const float *restrict x, float mean, float rstd,
                                             float gain, float term, int64_t n, int64_t activation) {
    CHOOSE_ACTIVATION_BACKWARD(Z_UNIFORM)
}

VECTOR_LOOP void activation_backward_columns(float *restrict dz, const float *restrict dy, const float *restrict x,
                                             const float *restrict mean, const float *restrict rstd, const float *restrict gain,
                                             const float *restrict term, int64_t n, int64_t activation) {
    CHOOSE_ACTIVATION_BACKWARD(Z_COLUMNS)
}

/* x_hat from y, (36). Where the gain is 0, y says nothing about x_hat, which becomes NaN. */
VECTOR_LOOP void x_hat_from_y(float *restrict x_hat, const float *restrict y, const float *restrict gain, const float *restrict term,
                              int64_t n) {
    for (int64_t i = 0; i < n; i++) x_hat[i] = gain[i] == 0.0f ? NAN : (y[i] - term[i]) / gain[i];
}

VECTOR_LOOP void x_hat_from_y_uniform(float *restrict x_hat, const float *restrict y, float gain, float term, int64_t n) {
    for (int64_t i = 0; i < n; i++) x_hat[i] = gain == 0.0f ? NAN : (y[i] - term) / gain;
}
