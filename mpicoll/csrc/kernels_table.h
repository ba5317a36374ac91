/* The kernels of one instruction set and their table, on top of kernels_vectors.h. */

#define NUMBER_KERNEL(define, op, type, combine, finish)                                                               \
    define(reduce_##op##_##type, sizeof(type), VECTOR(type), LEVEL(load_##type), LEVEL(pack_##type),                   \
           LEVEL(combine##_##type), LEVEL(finish##_##type))

#define UNSIGNED_KERNELS(type, mask)                                                                                   \
    NUMBER_KERNEL(DEFINE_KERNEL, sum, type, sum, keep)                                                                 \
    NUMBER_KERNEL(DEFINE_KERNEL, prod, type, prod, keep)                                                               \
    NUMBER_KERNEL(DEFINE_KERNEL, band, type, band, keep)                                                               \
    NUMBER_KERNEL(DEFINE_KERNEL, bor, type, bor, keep)                                                                 \
    NUMBER_KERNEL(DEFINE_KERNEL, bxor, type, bxor, keep)                                                               \
    NUMBER_KERNEL(DEFINE_KERNEL, land, type, land, truth)                                                              \
    NUMBER_KERNEL(DEFINE_KERNEL, lor, type, lor, truth)                                                                \
    NUMBER_KERNEL(DEFINE_KERNEL, lxor, type, lxor, truth)
EACH_UNSIGNED(UNSIGNED_KERNELS)

#define EXTREME_KERNELS(type, mask)                                                                                    \
    NUMBER_KERNEL(DEFINE_KERNEL, min, type, min, keep)                                                                 \
    NUMBER_KERNEL(DEFINE_KERNEL, max, type, max, keep)
EACH_INTEGER(EXTREME_KERNELS)

#define SUM_KERNELS(type, mask)                                                                                        \
    NUMBER_KERNEL(DEFINE_KERNEL, sum, type, sum, keep)                                                                 \
    NUMBER_KERNEL(DEFINE_KERNEL, avg, type, sum, divide)                                                               \
    NUMBER_KERNEL(DEFINE_STREAM, sum, type, sum, keep)                                                                 \
    NUMBER_KERNEL(DEFINE_STREAM, avg, type, sum, divide)

#define FLOAT_KERNELS(type, mask)                                                                                      \
    SUM_KERNELS(type, mask)                                                                                            \
    NUMBER_KERNEL(DEFINE_KERNEL, prod, type, prod, keep)                                                               \
    EXTREME_KERNELS(type, mask)
EACH_FLOAT(FLOAT_KERNELS)

HALF_KERNELS(float16)

/* Sums of complex numbers are those of their parts. The rest is not vectorised: it is rare. */
#define COMPLEX_KERNELS(complex, type)                                                                                 \
    static void LEVEL(reduce_sum_##complex)(void *out, const void *const *parts, int nparts, size_t count)             \
    {                                                                                                                  \
        LEVEL(reduce_sum_##type)(out, parts, nparts, 2 * count);                                                       \
    }                                                                                                                  \
    static void LEVEL(reduce_prod_##complex)(void *out, const void *const *parts, int nparts, size_t count)            \
    {                                                                                                                  \
        for (size_t at = 0; at < count * 2 * sizeof(type); at += 2 * sizeof(type)) {                                   \
            type total[2], value[2];                                                                                   \
            memcpy(total, (const char *)parts[0] + at, sizeof total);                                                  \
            for (int part = 1; part < nparts; part++) {                                                                \
                memcpy(value, (const char *)parts[part] + at, sizeof value);                                           \
                type real = total[0] * value[0] - total[1] * value[1];                                                 \
                total[1] = total[0] * value[1] + total[1] * value[0];                                                  \
                total[0] = real;                                                                                       \
            }                                                                                                          \
            memcpy((char *)out + at, total, sizeof total);                                                             \
        }                                                                                                              \
    }                                                                                                                  \
    static void LEVEL(reduce_avg_##complex)(void *out, const void *const *parts, int nparts, size_t count)             \
    {                                                                                                                  \
        /* numpy divides by nparts + 0i, which affects infinities and signs of zero. */                                \
        const type ratio = 0, scale = 1 / (type)nparts;                                                                \
        LEVEL(reduce_sum_##type)(out, parts, nparts, 2 * count);                                                       \
        for (size_t at = 0; at < count * 2 * sizeof(type); at += 2 * sizeof(type)) {                                   \
            type total[2];                                                                                             \
            memcpy(total, (char *)out + at, sizeof total);                                                             \
            type value[2] = {(total[0] + total[1] * ratio) * scale, (total[1] - total[0] * ratio) * scale};            \
            memcpy((char *)out + at, value, sizeof value);                                                             \
        }                                                                                                              \
    }
COMPLEX_KERNELS(complex64, float)
COMPLEX_KERNELS(complex128, double)

/* --- The kernel of each operation and dtype --- */

#define ROW_UNSIGNED(op)                                                                                               \
    [INT8] = LEVEL(reduce_##op##_uint8_t), [UINT8] = LEVEL(reduce_##op##_uint8_t),                                     \
    [INT16] = LEVEL(reduce_##op##_uint16_t), [UINT16] = LEVEL(reduce_##op##_uint16_t),                                 \
    [INT32] = LEVEL(reduce_##op##_uint32_t), [UINT32] = LEVEL(reduce_##op##_uint32_t),                                 \
    [INT64] = LEVEL(reduce_##op##_uint64_t), [UINT64] = LEVEL(reduce_##op##_uint64_t)
#define ROW_ORDERED(op)                                                                                                \
    [INT8] = LEVEL(reduce_##op##_int8_t), [UINT8] = LEVEL(reduce_##op##_uint8_t),                                      \
    [INT16] = LEVEL(reduce_##op##_int16_t), [UINT16] = LEVEL(reduce_##op##_uint16_t),                                  \
    [INT32] = LEVEL(reduce_##op##_int32_t), [UINT32] = LEVEL(reduce_##op##_uint32_t),                                  \
    [INT64] = LEVEL(reduce_##op##_int64_t), [UINT64] = LEVEL(reduce_##op##_uint64_t)
#define ROW_FLOAT(op)                                                                                                  \
    [FLOAT16] = LEVEL(reduce_##op##_float16), [BFLOAT16] = LEVEL(reduce_##op##_bfloat16),                              \
    [FLOAT32] = LEVEL(reduce_##op##_float), [FLOAT64] = LEVEL(reduce_##op##_double)
#define ROW_COMPLEX(op)                                                                                                \
    [COMPLEX64] = LEVEL(reduce_##op##_complex64), [COMPLEX128] = LEVEL(reduce_##op##_complex128)
#define ROW_BOOL(op) [BOOL] = LEVEL(reduce_##op##_uint8_t)

static const ReduceKernel LEVEL(table)[OPS][DTYPES] = {
    [SUM] = {ROW_UNSIGNED(sum), ROW_FLOAT(sum), ROW_COMPLEX(sum)},
    [PROD] = {ROW_UNSIGNED(prod), ROW_FLOAT(prod), ROW_COMPLEX(prod)},
    [AVG] = {ROW_FLOAT(avg), ROW_COMPLEX(avg)},
    [MIN] = {ROW_ORDERED(min), ROW_FLOAT(min), ROW_BOOL(land)},
    [MAX] = {ROW_ORDERED(max), ROW_FLOAT(max), ROW_BOOL(lor)},
    [BAND] = {ROW_UNSIGNED(band), ROW_BOOL(land)},
    [BOR] = {ROW_UNSIGNED(bor), ROW_BOOL(lor)},
    [BXOR] = {ROW_UNSIGNED(bxor), ROW_BOOL(lxor)},
    [LAND] = {ROW_UNSIGNED(land), ROW_BOOL(land)},
    [LOR] = {ROW_UNSIGNED(lor), ROW_BOOL(lor)},
    [LXOR] = {ROW_UNSIGNED(lxor), ROW_BOOL(lxor)},
};

#if VECTOR_BYTES >= 32
/* The operations on large vectors. */
static const ReduceKernel LEVEL(streams)[OPS][DTYPES] = {
    [SUM] = {[FLOAT16] = LEVEL(reduce_sum_float16_stream), [BFLOAT16] = LEVEL(reduce_sum_bfloat16_stream),
             [FLOAT32] = LEVEL(reduce_sum_float_stream), [FLOAT64] = LEVEL(reduce_sum_double_stream)},
    [AVG] = {[FLOAT16] = LEVEL(reduce_avg_float16_stream), [BFLOAT16] = LEVEL(reduce_avg_bfloat16_stream),
             [FLOAT32] = LEVEL(reduce_avg_float_stream), [FLOAT64] = LEVEL(reduce_avg_double_stream)},
};
#endif
