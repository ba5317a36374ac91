/* What kernels are made of, compiled once for each instruction set: included with these macros defined.
 *
 *   LEVEL(name)    the name of a function or type in this instruction set
 *   VECTOR_BYTES   the length of a vector: 32 stands for AVX2 with F16C, 64 for AVX-512
 *
 * A kernel reads the operands a few vectors at a time, combines them in registers in the order of the parts and writes
 * each result once. So every element is read before its place is written, and `out` may be one of the parts. */

#define VECTOR(type) LEVEL(Vector_##type)

#define DEFINE_VECTOR(type, mask) typedef type VECTOR(type) __attribute__((vector_size(VECTOR_BYTES)));
EACH_NUMBER(DEFINE_VECTOR)

/* A vector comparison yields a vector of signed integers: all bits set for true. */
#define SELECT(Vector, Mask, mask, left, right) ((Vector)(((mask) & (Mask)(left)) | (~(mask) & (Mask)(right))))

/* --- What a kernel is made of, for types that are combined as they are --- */

#define DEFINE_ACCESS(type, mask)                                                                                      \
    INLINE VECTOR(type) LEVEL(load_##type)(const char *from)                                                           \
    {                                                                                                                  \
        VECTOR(type) vector;                                                                                           \
        memcpy(&vector, from, VECTOR_BYTES);                                                                           \
        return vector;                                                                                                 \
    }                                                                                                                  \
    INLINE void LEVEL(store_##type)(char *to, VECTOR(type) vector) { memcpy(to, &vector, VECTOR_BYTES); }              \
    INLINE VECTOR(type) LEVEL(keep_##type)(VECTOR(type) total, int nparts)                                             \
    {                                                                                                                  \
        (void)nparts;                                                                                                  \
        return total;                                                                                                  \
    }
EACH_NUMBER(DEFINE_ACCESS)

#define DEFINE_COMBINE(op, type, expression)                                                                           \
    INLINE VECTOR(type) LEVEL(op##_##type)(VECTOR(type) a, VECTOR(type) b) { return expression; }

#define DEFINE_UNSIGNED(type, mask)                                                                                    \
    DEFINE_COMBINE(sum, type, a + b)                                                                                   \
    DEFINE_COMBINE(prod, type, a * b)                                                                                  \
    DEFINE_COMBINE(band, type, a & b)                                                                                  \
    DEFINE_COMBINE(bor, type, a | b)                                                                                   \
    DEFINE_COMBINE(bxor, type, a ^ b)                                                                                  \
    DEFINE_COMBINE(land, type, (VECTOR(type))((a != 0) & (b != 0)))                                                    \
    DEFINE_COMBINE(lor, type, a | b)                                                                                   \
    DEFINE_COMBINE(lxor, type, (VECTOR(type))((a != 0) ^ (b != 0)))                                                    \
    INLINE VECTOR(type) LEVEL(truth_##type)(VECTOR(type) total, int nparts)                                            \
    {                                                                                                                  \
        (void)nparts;                                                                                                  \
        return (VECTOR(type))(total != 0) & 1;                                                                         \
    }
EACH_UNSIGNED(DEFINE_UNSIGNED)

#define DEFINE_EXTREMES(type, mask)                                                                                    \
    DEFINE_COMBINE(min, type, SELECT(VECTOR(type), VECTOR(mask), a < b, a, b))                                         \
    DEFINE_COMBINE(max, type, SELECT(VECTOR(type), VECTOR(mask), a > b, a, b))
EACH_INTEGER(DEFINE_EXTREMES)

/* As numpy: a NaN is the result, the first of them; of zeros with two signs it is the second. */
#define DEFINE_FLOAT(type, mask)                                                                                       \
    DEFINE_COMBINE(sum, type, a + b)                                                                                   \
    DEFINE_COMBINE(prod, type, a * b)                                                                                  \
    DEFINE_COMBINE(min, type, SELECT(VECTOR(type), VECTOR(mask), (a < b) | (a != a), a, b))                            \
    DEFINE_COMBINE(max, type, SELECT(VECTOR(type), VECTOR(mask), (a > b) | (a != a), a, b))                            \
    INLINE VECTOR(type) LEVEL(divide_##type)(VECTOR(type) total, int nparts) { return total / (type)nparts; }
EACH_FLOAT(DEFINE_FLOAT)

/* --- Halves: a vector of them is two vectors of float32 --- */

typedef struct {
    VECTOR(float) low, high;
} LEVEL(Wide);
#define WIDE LEVEL(Wide)
#define WORDS VECTOR(uint32_t)
#define FLOATS VECTOR(float)

#define DEFINE_WIDE_COMBINE(op)                                                                                        \
    INLINE WIDE LEVEL(op##_wide)(WIDE a, WIDE b)                                                                       \
    {                                                                                                                  \
        return (WIDE){LEVEL(op##_float)(a.low, b.low), LEVEL(op##_float)(a.high, b.high)};                             \
    }
DEFINE_WIDE_COMBINE(sum)
DEFINE_WIDE_COMBINE(prod)
DEFINE_WIDE_COMBINE(min)
DEFINE_WIDE_COMBINE(max)

#define DEFINE_WIDE_FINISH(finish)                                                                                     \
    INLINE WIDE LEVEL(finish##_wide)(WIDE total, int nparts)                                                           \
    {                                                                                                                  \
        return (WIDE){LEVEL(finish##_float)(total.low, nparts), LEVEL(finish##_float)(total.high, nparts)};            \
    }
DEFINE_WIDE_FINISH(keep)
DEFINE_WIDE_FINISH(divide)

/* A word holds two bfloat16, which are the upper halves of float32: no lane moves to another place. */
INLINE WIDE LEVEL(load_bfloat16)(const char *from)
{
    WORDS words = LEVEL(load_uint32_t)(from);
    return (WIDE){(FLOATS)(words << 16), (FLOATS)(words & 0xFFFF0000u)};
}

/* To nearest, ties to even. A NaN needs no care: it comes from an operand, so that its lower half is 0 and nothing is
 * carried into its exponent, or from the processor, where the same holds. */
INLINE WORDS LEVEL(round_bfloat16)(FLOATS value)
{
    WORDS bits = (WORDS)value;
#if VECTOR_BYTES == 64
    /* The same with an instruction less. */
    __mmask16 odd = _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(0x10000));
    __m512i rounded = _mm512_add_epi32((__m512i)bits, _mm512_set1_epi32(0x7FFF));
    return (WORDS)_mm512_mask_add_epi32(rounded, odd, (__m512i)bits, _mm512_set1_epi32(0x8000));
#else
    return bits + 0x7FFFu + ((bits >> 16) & 1u);
#endif
}

INLINE void LEVEL(store_bfloat16)(char *to, WIDE total)
{
    WORDS low = LEVEL(round_bfloat16)(total.low) >> 16;
    LEVEL(store_uint32_t)(to, low | (LEVEL(round_bfloat16)(total.high) & 0xFFFF0000u));
}

#if VECTOR_BYTES == 32
INLINE WIDE LEVEL(load_float16)(const char *from)
{
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 16)));
    return (WIDE){(FLOATS)low, (FLOATS)high};
}

INLINE void LEVEL(store_float16)(char *to, WIDE total)
{
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)total.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(to + 16), _mm256_cvtps_ph((__m256)total.high, _MM_FROUND_TO_NEAREST_INT));
}
#else
#define PICK(mask, left, right) SELECT(WORDS, VECTOR(int32_t), mask, left, right)

/* The float16 in the lower half of each word; the upper half is 0. */
INLINE FLOATS LEVEL(widen_float16)(WORDS half)
{
    WORDS magnitude = half & 0x7FFFu;
    WORDS normal = (magnitude << 13) + (112u << 23);
    /* Integers of 10 bits: that is exact, and needs no float32 arithmetic with subnormal numbers. */
    FLOATS small = __builtin_convertvector((VECTOR(int32_t))magnitude, FLOATS) * 0x1p-24f;
    WORDS bits = PICK(magnitude < 0x400u, small, normal);
    bits = PICK(magnitude >= 0x7C00u, (magnitude << 13) | 0x7F800000u, bits);
    return (FLOATS)(bits | (half & 0x8000u) << 16);
}

/* To nearest, ties to even. */
INLINE WORDS LEVEL(narrow_float16)(FLOATS value)
{
    WORDS bits = (WORDS)value, magnitude = bits & 0x7FFFFFFFu;
    WORDS normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    WORDS finite = PICK(normal > 0x7C00u, (WORDS){0} + 0x7C00u, normal);
    /* One unit of 0.5 in float32 is one of the smallest float16, so the sum is rounded as it should be. */
    WORDS small = (WORDS)((FLOATS)magnitude + 0.5f) - 0x3F000000u;
    WORDS half = PICK(magnitude < 0x38800000u, small, finite);
    half = PICK(magnitude > 0x7F800000u, 0x7E00u | ((magnitude >> 13) & 0x3FFu), half);
    return half | ((bits >> 16) & 0x8000u);
}

INLINE WIDE LEVEL(load_float16)(const char *from)
{
    WORDS words = LEVEL(load_uint32_t)(from);
    return (WIDE){LEVEL(widen_float16)(words & 0xFFFFu), LEVEL(widen_float16)(words >> 16)};
}

INLINE void LEVEL(store_float16)(char *to, WIDE total)
{
    LEVEL(store_uint32_t)(to, LEVEL(narrow_float16)(total.low) | LEVEL(narrow_float16)(total.high) << 16);
}
#undef PICK
#endif

/* --- Kernels --- */

/* `at` counts bytes. What is left after the last vector is combined in a padded one. `item` is the size of an element;
 * one of a complex dtype is two numbers. */
#define DEFINE_KERNEL(name, item, Vector, load, store, combine, finish)                                                \
    INLINE void LEVEL(name##_of)(char *out, const char *const *parts, const int nparts, size_t bytes)                  \
    {                                                                                                                  \
        size_t at = 0;                                                                                                 \
        for (; bytes - at >= 4 * VECTOR_BYTES; at += 4 * VECTOR_BYTES) {                                               \
            const char *from = parts[0] + at;                                                                          \
            Vector total0 = load(from), total1 = load(from + VECTOR_BYTES);                                            \
            Vector total2 = load(from + 2 * VECTOR_BYTES), total3 = load(from + 3 * VECTOR_BYTES);                     \
            for (int part = 1; part < nparts; part++) {                                                                \
                from = parts[part] + at;                                                                               \
                total0 = combine(total0, load(from));                                                                  \
                total1 = combine(total1, load(from + VECTOR_BYTES));                                                   \
                total2 = combine(total2, load(from + 2 * VECTOR_BYTES));                                               \
                total3 = combine(total3, load(from + 3 * VECTOR_BYTES));                                               \
            }                                                                                                          \
            store(out + at, finish(total0, nparts));                                                                   \
            store(out + at + VECTOR_BYTES, finish(total1, nparts));                                                    \
            store(out + at + 2 * VECTOR_BYTES, finish(total2, nparts));                                                \
            store(out + at + 3 * VECTOR_BYTES, finish(total3, nparts));                                                \
        }                                                                                                              \
        for (; bytes - at >= VECTOR_BYTES; at += VECTOR_BYTES) {                                                       \
            Vector total = load(parts[0] + at);                                                                        \
            for (int part = 1; part < nparts; part++)                                                                  \
                total = combine(total, load(parts[part] + at));                                                        \
            store(out + at, finish(total, nparts));                                                                    \
        }                                                                                                              \
        if (at < bytes) {                                                                                              \
            char padded[VECTOR_BYTES] = {0};                                                                           \
            copy_rest(padded, parts[0] + at, bytes - at);                                                              \
            Vector total = load(padded);                                                                               \
            for (int part = 1; part < nparts; part++) {                                                                \
                copy_rest(padded, parts[part] + at, bytes - at);                                                       \
                total = combine(total, load(padded));                                                                  \
            }                                                                                                          \
            store(padded, finish(total, nparts));                                                                      \
            copy_rest(out + at, padded, bytes - at);                                                                   \
        }                                                                                                              \
    }                                                                                                                  \
    static void LEVEL(name)(void *out, const void *const *parts, int nparts, size_t count)                             \
    {                                                                                                                  \
        const char *const *from = (const char *const *)parts;                                                          \
        if (nparts == 2)                                                                                               \
            LEVEL(name##_of)(out, from, 2, count * (item));                                                            \
        else                                                                                                           \
            LEVEL(name##_of)(out, from, nparts, count * (item));                                                       \
    }

#define HALF_KERNEL(op, half, combine, finish)                                                                         \
    DEFINE_KERNEL(reduce_##op##_##half, 2, WIDE, LEVEL(load_##half), LEVEL(store_##half), LEVEL(combine##_wide),       \
                  LEVEL(finish##_wide))
#define HALF_KERNELS(half)                                                                                             \
    HALF_KERNEL(sum, half, sum, keep)                                                                                  \
    HALF_KERNEL(prod, half, prod, keep)                                                                                \
    HALF_KERNEL(avg, half, sum, divide)                                                                                \
    HALF_KERNEL(min, half, min, keep)                                                                                  \
    HALF_KERNEL(max, half, max, keep)
HALF_KERNELS(bfloat16)
