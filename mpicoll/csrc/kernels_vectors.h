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
#define BITS VECTOR(uint64_t)

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
    INLINE BITS LEVEL(pack_##type)(VECTOR(type) vector) { return (BITS)vector; }                                       \
    INLINE VECTOR(type) LEVEL(keep_##type)(VECTOR(type) total, int nparts)                                             \
    {                                                                                                                  \
        (void)nparts;                                                                                                  \
        return total;                                                                                                  \
    }
EACH_NUMBER(DEFINE_ACCESS)

INLINE void LEVEL(store)(char *to, BITS vector) { memcpy(to, &vector, VECTOR_BYTES); }

/* Fetch what is read later. Of halves only: conversions fill the processor's window before it meets enough loads. */
INLINE void LEVEL(fetch_for_stream)(const char *from)
{
    for (size_t line = 0; line < 4 * VECTOR_BYTES; line += 64)
        __builtin_prefetch(from + AHEAD_BYTES + line);
}
INLINE void LEVEL(fetch_for_store)(const char *from) { (void)from; }

#if VECTOR_BYTES == 32
INLINE void LEVEL(stream)(char *to, BITS vector) { _mm256_stream_si256((__m256i *)to, (__m256i)vector); }
#elif VECTOR_BYTES == 64
INLINE void LEVEL(stream)(char *to, BITS vector) { _mm512_stream_si512((__m512i *)to, (__m512i)vector); }
#endif

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

INLINE BITS LEVEL(pack_bfloat16)(WIDE total)
{
    WORDS low = LEVEL(round_bfloat16)(total.low) >> 16;
    return (BITS)(low | (LEVEL(round_bfloat16)(total.high) & 0xFFFF0000u));
}

#if VECTOR_BYTES == 32
INLINE WIDE LEVEL(load_float16)(const char *from)
{
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 16)));
    return (WIDE){(FLOATS)low, (FLOATS)high};
}

INLINE BITS LEVEL(pack_float16)(WIDE total)
{
    __m128i low = _mm256_cvtps_ph((__m256)total.low, _MM_FROUND_TO_NEAREST_INT);
    __m128i high = _mm256_cvtps_ph((__m256)total.high, _MM_FROUND_TO_NEAREST_INT);
    return (BITS)_mm256_set_m128i(high, low);
}
#elif VECTOR_BYTES == 64
INLINE WIDE LEVEL(load_float16)(const char *from)
{
    __m512 low = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
    __m512 high = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + 32)));
    return (WIDE){(FLOATS)low, (FLOATS)high};
}

INLINE BITS LEVEL(pack_float16)(WIDE total)
{
    __m256i low = _mm512_cvtps_ph((__m512)total.low, _MM_FROUND_TO_NEAREST_INT);
    __m256i high = _mm512_cvtps_ph((__m512)total.high, _MM_FROUND_TO_NEAREST_INT);
    return (BITS)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#elif defined(__aarch64__)
INLINE WIDE LEVEL(load_float16)(const char *from)
{
    uint16x4_t low, high;
    memcpy(&low, from, 8);
    memcpy(&high, from + 8, 8);
    return (WIDE){(FLOATS)vcvt_f32_f16(vreinterpret_f16_u16(low)), (FLOATS)vcvt_f32_f16(vreinterpret_f16_u16(high))};
}

INLINE BITS LEVEL(pack_float16)(WIDE total)
{
    uint16x4_t low = vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)total.low));
    uint16x4_t high = vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)total.high));
    return (BITS)vcombine_u16(low, high);
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

INLINE BITS LEVEL(pack_float16)(WIDE total)
{
    return (BITS)(LEVEL(narrow_float16)(total.low) | LEVEL(narrow_float16)(total.high) << 16);
}
#undef PICK
#endif

/* --- Kernels --- */

/* The combination of bytes `at` to `bytes`, as far as it goes in steps of four vectors. Returns where it ended. */
#define DEFINE_LOOP(name, Vector, load, pack, combine, finish, write)                                                  \
    INLINE size_t LEVEL(name)(char *out, const char *const *parts, const int nparts, size_t at, size_t bytes)          \
    {                                                                                                                  \
        for (; bytes - at >= 4 * VECTOR_BYTES; at += 4 * VECTOR_BYTES) {                                               \
            const char *from = parts[0] + at;                                                                          \
            if (sizeof(Vector) > VECTOR_BYTES)                                                                         \
                LEVEL(fetch_for_##write)(from);                                                                        \
            Vector total0 = load(from), total1 = load(from + VECTOR_BYTES);                                            \
            Vector total2 = load(from + 2 * VECTOR_BYTES), total3 = load(from + 3 * VECTOR_BYTES);                     \
            for (int part = 1; part < nparts; part++) {                                                                \
                from = parts[part] + at;                                                                               \
                if (sizeof(Vector) > VECTOR_BYTES)                                                                     \
                    LEVEL(fetch_for_##write)(from);                                                                    \
                total0 = combine(total0, load(from));                                                                  \
                total1 = combine(total1, load(from + VECTOR_BYTES));                                                   \
                total2 = combine(total2, load(from + 2 * VECTOR_BYTES));                                               \
                total3 = combine(total3, load(from + 3 * VECTOR_BYTES));                                               \
            }                                                                                                          \
            LEVEL(write)(out + at, pack(finish(total0, nparts)));                                                      \
            LEVEL(write)(out + at + VECTOR_BYTES, pack(finish(total1, nparts)));                                       \
            LEVEL(write)(out + at + 2 * VECTOR_BYTES, pack(finish(total2, nparts)));                                   \
            LEVEL(write)(out + at + 3 * VECTOR_BYTES, pack(finish(total3, nparts)));                                   \
        }                                                                                                              \
        return at;                                                                                                     \
    }

/* `item` is the size of an element. What is left after the last vector is combined in padded ones, a word each. These
 * stay in registers: a load of a vector would wait until smaller stores to its memory have left the processor. */
#define DEFINE_KERNEL(name, item, Vector, load, pack, combine, finish)                                                 \
    DEFINE_LOOP(name##_loop, Vector, load, pack, combine, finish, store)                                               \
    static __attribute__((noinline)) Vector LEVEL(name##_pad)(uint64_t word)                                           \
    {                                                                                                                  \
        BITS padded = {word};                                                                                          \
        return load((const char *)&padded);                                                                            \
    }                                                                                                                  \
    static __attribute__((noinline)) void LEVEL(name##_rest)(char *out, const char *const *parts, const int nparts,    \
                                                             size_t at, size_t bytes)                                  \
    {                                                                                                                  \
        for (; bytes - at >= VECTOR_BYTES; at += VECTOR_BYTES) {                                                       \
            Vector total = load(parts[0] + at);                                                                        \
            for (int part = 1; part < nparts; part++)                                                                  \
                total = combine(total, load(parts[part] + at));                                                        \
            LEVEL(store)(out + at, pack(finish(total, nparts)));                                                       \
        }                                                                                                              \
        for (; at < bytes; at += WORD_BYTES) {                                                                         \
            const size_t left = bytes - at;                                                                            \
            Vector total = LEVEL(name##_pad)(read_word(parts[0] + at, left));                                          \
            for (int part = 1; part < nparts; part++)                                                                  \
                total = combine(total, LEVEL(name##_pad)(read_word(parts[part] + at, left)));                          \
            write_word(out + at, pack(finish(total, nparts))[0], left);                                                \
        }                                                                                                              \
    }                                                                                                                  \
    static void LEVEL(name)(void *out, const void *const *parts, int nparts, size_t count)                             \
    {                                                                                                                  \
        const char *const *from = (const char *const *)parts;                                                          \
        const size_t bytes = count * (item);                                                                           \
        size_t at = nparts == 2 ? LEVEL(name##_loop)(out, from, 2, 0, bytes)                                           \
                                : LEVEL(name##_loop)(out, from, nparts, 0, bytes);                                     \
        if (at < bytes)                                                                                                \
            LEVEL(name##_rest)(out, from, nparts, at, bytes);                                                          \
    }

/* The same for a result that is not read soon: it is written past the caches, which would read its memory first. */
#undef DEFINE_STREAM
#if VECTOR_BYTES >= 32
#define DEFINE_STREAM(name, item, Vector, load, pack, combine, finish)                                                 \
    DEFINE_LOOP(name##_stream_loop, Vector, load, pack, combine, finish, stream)                                       \
    static void LEVEL(name##_stream)(void *out, const void *const *parts, int nparts, size_t count)                    \
    {                                                                                                                  \
        const char *const *from = (const char *const *)parts;                                                          \
        const size_t bytes = count * (item), head = -(uintptr_t)out % VECTOR_BYTES;                                    \
        if (bytes <= head || head % (item) || is_among(out, parts, nparts)) {                                          \
            LEVEL(name)(out, parts, nparts, count);                                                                    \
            return;                                                                                                    \
        }                                                                                                              \
        LEVEL(name##_rest)(out, from, nparts, 0, head);                                                                \
        size_t at = LEVEL(name##_stream_loop)(out, from, nparts, head, bytes);                                         \
        LEVEL(name##_rest)(out, from, nparts, at, bytes);                                                              \
        _mm_sfence();                                                                                                  \
    }
#else
#define DEFINE_STREAM(name, item, Vector, load, pack, combine, finish)
#endif

#define HALF_KERNEL(define, op, half, combine, finish)                                                                 \
    define(reduce_##op##_##half, 2, WIDE, LEVEL(load_##half), LEVEL(pack_##half), LEVEL(combine##_wide),               \
           LEVEL(finish##_wide))
#define HALF_KERNELS(half)                                                                                             \
    HALF_KERNEL(DEFINE_KERNEL, sum, half, sum, keep)                                                                   \
    HALF_KERNEL(DEFINE_KERNEL, prod, half, prod, keep)                                                                 \
    HALF_KERNEL(DEFINE_KERNEL, avg, half, sum, divide)                                                                 \
    HALF_KERNEL(DEFINE_KERNEL, min, half, min, keep)                                                                   \
    HALF_KERNEL(DEFINE_KERNEL, max, half, max, keep)                                                                   \
    HALF_KERNEL(DEFINE_STREAM, sum, half, sum, keep)                                                                   \
    HALF_KERNEL(DEFINE_STREAM, avg, half, sum, divide)
HALF_KERNELS(bfloat16)
