/* Compression of one block of at most BLOCK elements, compiled once for each instruction set: included with LEVEL(name)
 * defined. The loops are simple ones, which compilers turn into vector instructions.
 *
 * A block is copied to local memory first, so arrays need not be aligned, and `result` may be `values`. A block with
 * fewer elements is filled up with zeros, which change nothing. */

INLINE void LEVEL(load)(float *block, const char *from, size_t count)
{
    if (count < BLOCK)
        memset(block, 0, BLOCK * sizeof(float));
    memcpy(block, from, count * sizeof(float));
}

/* Load values + error, which are to be sent. */
INLINE void LEVEL(load_operand)(float *block, const char *values, const char *error, size_t count)
{
    float left[BLOCK];
    LEVEL(load)(block, values, count);
    if (error == NULL)
        return;
    LEVEL(load)(left, error, count);
    for (size_t i = 0; i < BLOCK; i++)
        block[i] += left[i];
}

/* Store `block`, or result + block. */
INLINE void LEVEL(store)(char *result, float *block, size_t count, int add)
{
    float sum[BLOCK];
    if (add) {
        LEVEL(load)(sum, result, count);
        for (size_t i = 0; i < BLOCK; i++)
            block[i] = sum[i] + block[i];
    }
    memcpy(result, block, count * sizeof(float));
}

static void LEVEL(pack_bf16)(
    const char *values, char *message, size_t blocks, size_t index, char *error, char *result, size_t count)
{
    float block[BLOCK], sent[BLOCK];
    uint32_t bits[BLOCK];
    uint16_t codes[BLOCK];
    (void)blocks;
    LEVEL(load_operand)(block, values, error, count);
    memcpy(bits, block, sizeof bits);
    for (size_t i = 0; i < BLOCK; i++) {
        /* To the nearest, ties to even. A NaN stays one, even if only its low bits say so. */
        const uint32_t rounded = bits[i] + 0x7FFFu + ((bits[i] >> 16) & 1u);
        const uint32_t is_nan = (bits[i] & 0x7FFFFFFFu) > 0x7F800000u ? 0xFFFFFFFFu : 0u;
        bits[i] = ((rounded & ~is_nan) | ((bits[i] | 0x400000u) & is_nan)) & 0xFFFF0000u;
        codes[i] = (uint16_t)(bits[i] >> 16);
    }
    memcpy(message + index * BLOCK * sizeof *codes, codes, count * sizeof *codes);
    memcpy(sent, bits, sizeof sent);
    if (error != NULL) {
        uint32_t left[BLOCK];
        for (size_t i = 0; i < BLOCK; i++)
            block[i] -= sent[i];
        memcpy(left, block, sizeof left);
        for (size_t i = 0; i < BLOCK; i++) /* what is not finite can't be sent later */
            left[i] &= (bits[i] & 0x7F800000u) == 0x7F800000u ? 0u : 0xFFFFFFFFu;
        memcpy(error, left, count * sizeof(float));
    }
    if (result != NULL)
        memcpy(result, sent, count * sizeof(float));
}

static void LEVEL(unpack_bf16)(
    const char *message, size_t blocks, size_t index, char *result, size_t count, int add)
{
    float block[BLOCK];
    uint32_t bits[BLOCK];
    uint16_t codes[BLOCK] = {0};
    (void)blocks;
    memcpy(codes, message + index * BLOCK * sizeof *codes, count * sizeof *codes);
    for (size_t i = 0; i < BLOCK; i++)
        bits[i] = (uint32_t)codes[i] << 16;
    memcpy(block, bits, sizeof block);
    LEVEL(store)(result, block, count, add);
}

/* The scales of all blocks precede the codes in a message. */
static void LEVEL(pack_int8)(
    const char *values, char *message, size_t blocks, size_t index, char *error, char *result, size_t count)
{
    float block[BLOCK], sent[BLOCK];
    uint32_t bits[BLOCK], largest = 0;
    int8_t codes[BLOCK] = {0};
    LEVEL(load_operand)(block, values, error, count);
    memcpy(bits, block, sizeof bits);
    for (size_t i = 0; i < BLOCK; i++) {
        const uint32_t magnitude = bits[i] & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    float maximum, scale = 0;
    memcpy(&maximum, &largest, sizeof maximum);
    const int finite = largest < 0x7F800000u;
    if (finite && maximum >= SMALLEST) {
        int32_t whole[BLOCK];
        const float inverse = LARGEST_CODE / maximum;
        scale = maximum / LARGEST_CODE;
        scale = scale < LARGEST_SCALE ? scale : LARGEST_SCALE;
        /* The sum has no bits below the units: it is rounded to the nearest, ties to even. */
        for (size_t i = 0; i < BLOCK; i++)
            sent[i] = block[i] * inverse + UNITS;
        memcpy(whole, sent, sizeof whole);
        for (size_t i = 0; i < BLOCK; i++) {
            codes[i] = (int8_t)(whole[i] - UNITS_BITS);
            sent[i] = (sent[i] - UNITS) * scale;
        }
    } else {
        scale = finite ? 0 : NAN;
        for (size_t i = 0; i < BLOCK; i++)
            sent[i] = scale;
    }
    memcpy(message + index * sizeof scale, &scale, sizeof scale);
    memcpy(message + blocks * sizeof scale + index * BLOCK, codes, count);
    if (error != NULL) {
        for (size_t i = 0; i < BLOCK; i++) /* what is not finite can't be sent later */
            block[i] = finite ? block[i] - sent[i] : 0;
        memcpy(error, block, count * sizeof(float));
    }
    if (result != NULL)
        memcpy(result, sent, count * sizeof(float));
}

static void LEVEL(unpack_int8)(
    const char *message, size_t blocks, size_t index, char *result, size_t count, int add)
{
    float block[BLOCK], scale;
    int8_t codes[BLOCK] = {0};
    memcpy(&scale, message + index * sizeof scale, sizeof scale);
    memcpy(codes, message + blocks * sizeof scale + index * BLOCK, count);
    for (size_t i = 0; i < BLOCK; i++)
        block[i] = (float)codes[i] * scale;
    LEVEL(store)(result, block, count, add);
}
