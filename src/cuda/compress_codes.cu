/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_codes.cu - the codes of the residuals (src/codec/ladder_codes.c): into the transform's coordinates, a gain,
 * and the level's bits.
 */
#include "cuda/compress_device.cuh"

#define BLOCK AKV_BLOCK_TOKENS
#define DIM AKV_COMP_MAX_DIM
#define GROUP AKV_GROUP_LANES
#define AKV_COMP_GAINS 16
#define THREADS 256
#define TILE AKV_COMP_TILE
#define Z_STRIDE (DIM + 1)

template <int PAD> struct Codes {
    uint16_t transform[DIM * comp_unit_stride<PAD>()]; /* fp16 [coordinates, dim] */
    float z[TILE * Z_STRIDE];
    float inverse[DIM], sigma_sq[DIM]; /* of the level's coordinates */
    uint8_t coord[DIM];
    uint8_t numbers[DIM * (TILE + 4)];
    uint8_t gains[TILE];
    uint32_t rest[512]; /* the last group, whose numbers straddle bytes */
    uint16_t tokens[BLOCK];
    uint32_t scan[33];
};

#define UNIT1 0.7979f /* of core/ladder.h */
#define UNIT2 0.15104f
#define UNIT4 0.02622f
#define MIDDLE(unit, a, b) (0.5f * ((unit) * (float)(a) + (unit) * (float)(b)))

/* Unsigned level of m, and how many levels of its half lie below it. */
template <int WIDTH> static __device__ __forceinline__ float level_of(float m, uint32_t *rank)
{
    if (WIDTH == 1) {
        *rank = 0;
        return UNIT1;
    }
    if (WIDTH == 2) {
        *rank = m >= MIDDLE(UNIT2, 3, 10);
        return UNIT2 * (m >= MIDDLE(UNIT2, 3, 10) ? 10.0f : 3.0f);
    }
    const float steps[8] = {5, 15, 25, 36, 48, 62, 79, 104};
    uint32_t r = 0;
    float level = 5;
#pragma unroll
    for (int i = 0; i < 7; i++)
        if (m >= MIDDLE(UNIT4, steps[i], steps[i + 1])) {
            r = (uint32_t)i + 1;
            level = steps[i + 1];
        }
    *rank = r;
    return UNIT4 * level;
}

static __device__ __forceinline__ float gain_value(uint32_t code)
{
    const uint32_t n = code + 1;
    const float third = n % 3 == 0 ? 1.0f : n % 3 == 1 ? 1.2599210f : 1.5874011f;
    return third * (float)(1u << (n / 3)) * 0.125f;
}

static __device__ __forceinline__ uint32_t nearest_gain(float gain)
{
    const float code = rintf(3.0f * log2f(fmaxf(gain, 1e-9f))) + 8.0f;
    return code < 0.0f ? 0 : code > 15.0f ? 15 : (uint32_t)code;
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int WIDTH, typename S>
static __device__ __forceinline__ void add_sums(const S &s, const float *z, uint32_t from, uint32_t to, float inverse,
                                                float sums[3])
{
    for (uint32_t i = from + threadIdx.x % 4; i < to; i += 4) {
        const float m = fabsf(z[s.coord[i]] * s.inverse[i]);
        uint32_t rank;
        const float level = level_of<WIDTH>(m * inverse, &rank), weight = s.sigma_sq[i];
        sums[0] += m * m * weight;
        sums[1] += m * level * weight;
        sums[2] += level * level * weight;
    }
}

/*
 * Squared error of this token's coordinates z coded with a gain; *best: the gain that fits these codes best. Four
 * threads.
 */
template <typename S>
static __device__ float coded_error(const S &s, const float *z, const uint32_t width[3], uint32_t code, float *best)
{
    const float gain = gain_value(code), inverse = 1.0f / gain;
    float sums[3] = {0, 0, 0};
    add_sums<4>(s, z, 0, width[0], inverse, sums);
    add_sums<2>(s, z, width[0], width[0] + width[1], inverse, sums);
    add_sums<1>(s, z, width[0] + width[1], width[0] + width[1] + width[2], inverse, sums);
    for (int i = 0; i < 3; i++)
        sums[i] = quad_sum(sums[i]);
    *best = sums[2] > 0.0f ? sums[1] / sums[2] : 1.0f;
    return sums[0] - gain * (2.0f * sums[1] - gain * sums[2]);
}

/* As gain_of of ladder_codes.c; all four threads of a token agree. */
template <typename S> static __device__ uint32_t gain_of(const S &s, const float *z, const uint32_t width[3])
{
    const uint32_t count = width[0] + width[1] + width[2];
    float square = 0, gain, ignored;
    for (uint32_t i = threadIdx.x % 4; i < count; i += 4) {
        const float x = z[s.coord[i]] * s.inverse[i];
        square += x * x;
    }
    square = quad_sum(square);
    coded_error(s, z, width, nearest_gain(count > 0 ? sqrtf(square / (float)count) : 1.0f), &gain);
    const uint32_t middle = nearest_gain(gain);
    uint32_t code = middle;
    float least = coded_error(s, z, width, middle, &ignored);
    for (int step = -1; step <= 1; step += 2) {
        bool on = true; /* all of a warp go on together: their sums meet in shuffles */
        for (int next = (int)middle + step; __any_sync(0xffffffffu, on); next += step) {
            on = on && next >= 0 && next < AKV_COMP_GAINS;
            const float error = coded_error(s, z, width, on ? (uint32_t)next : middle, &ignored);
            on = on && error < least;
            if (on) {
                least = error;
                code = (uint32_t)next;
            }
        }
    }
    return code;
}

template <int WIDTH, typename S>
static __device__ __forceinline__ void put_numbers(S &s, const float *z, uint32_t from, uint32_t to, float inverse,
                                                   uint32_t token)
{
    constexpr uint32_t half = WIDTH == 4 ? 8 : WIDTH == 2 ? 2 : 1;
    for (uint32_t i = from + threadIdx.x % 4; i < to; i += 4) {
        const float x = z[s.coord[i]] * s.inverse[i] * inverse;
        uint32_t rank;
        (void)level_of<WIDTH>(fabsf(x), &rank);
        s.numbers[i * (TILE + 4) + token] = (uint8_t)(x < 0.0f ? half - 1 - rank : half + rank);
    }
}

/* Codes of one (block of tokens, head, side). */
template <int PAD> static __global__ void __launch_bounds__(THREADS, 2) code_blocks(COMP_ARG, const int first_side)
{
    extern __shared__ float4 memory[];
    Codes<PAD> &s = *(Codes<PAD> *)memory;
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x;
    const int side = first_side + (int)blockIdx.z;
    const unsigned long long *offsets =
        (const unsigned long long *)(c.blob + c.section[AKV_SEC_RANKS]) + ((size_t)head * c.blocks + block) * 2 + side;
    if (offsets[0] == offsets[1])
        return;
    const uint32_t coords = c.coords[side];
    const uint64_t t0 = (uint64_t)block * BLOCK;
    const uint8_t *level_at = c.level[side] + (size_t)head * c.S + t0;
    const akv_comp_levels &levels = c.levels[head * 2 + side];
    uint8_t *out = c.codes + offsets[0];
    for (uint32_t i = threadIdx.x; i < DIM * PAD; i += THREADS)
        ((__half *)s.transform)[i / PAD * comp_unit_stride<PAD>() + i % PAD] =
            __float2half_rn(c.basis[side][(size_t)head * DIM * DIM + i / PAD * DIM + i % PAD]);
    for (uint32_t level = 1; level <= c.num_levels; level++) {
        uint32_t mine = 0, n;
        for (uint32_t j = 0; j < 4; j++)
            mine |= (t0 + threadIdx.x * 4 + j < c.S && level_at[threadIdx.x * 4 + j] == level) << j;
        uint32_t at = comp_block_scan((uint32_t)__popc(mine), s.scan, &n);
        if (n == 0)
            continue;
        for (uint32_t j = 0; j < 4; j++)
            if (mine >> j & 1u)
                s.tokens[at++] = (uint16_t)(threadIdx.x * 4 + j);
        const uint32_t width[3] = {levels.by_width[level - 1][0], levels.by_width[level - 1][1],
                                   levels.by_width[level - 1][2]};
        const uint32_t count = width[0] + width[1] + width[2], bits = levels.bits[level - 1];
        for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
            const uint32_t coord = levels.coord[level - 1][i];
            const float sigma = c.sigma[side][head * DIM + coord];
            s.coord[i] = (uint8_t)coord;
            s.inverse[i] = 1.0f / sigma;
            s.sigma_sq[i] = sigma * sigma;
        }
        __syncthreads();
        uint8_t *groups = out + (n + 1) / 2;
        for (uint32_t first = 0; first < n; first += TILE) {
            const uint32_t here = n - first < TILE ? n - first : TILE;
            const auto token_of = [&](uint32_t r) {
                return r < here ? (uint32_t)(t0 + s.tokens[first + r]) : NO_TOKEN;
            };
            { /* z = transform x residual: warp w has 16 tokens and half of the coordinates */
                const uint32_t row0 = warp % 4 * 16, col0 = warp / 4 * (DIM / 2);
                uint4 rows[2][PAD / 32];
                float length[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t of = token_of(row0 + lane / 4 + 8 * h);
                    const size_t at = (size_t)head * c.S + (of != NO_TOKEN ? of : (uint32_t)t0);
                    comp_row_chunks<PAD>(rows[h], c.rows16[side] + at * PAD);
                    length[h] = of != NO_TOKEN ? sqrtf(c.left[side][at]) : 0.0f;
                }
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (col0 + j * 8 >= coords)
                        break;
                    float acc[4] = {};
                    comp_products<PAD>(acc, rows[0], rows[1],
                                       s.transform + (col0 + j * 8 + lane / 4) * comp_unit_stride<PAD>());
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        s.z[(row0 + lane / 4 + i / 2 * 8) * Z_STRIDE + col0 + j * 8 + lane % 4 * 2 + (i & 1)] =
                            acc[i] * length[i / 2];
                }
            }
            __syncthreads();
            const uint32_t token = threadIdx.x / 4;
            const float *z = s.z + token * Z_STRIDE;
            const uint32_t code = gain_of(s, z, width);
            const float inverse = 1.0f / gain_value(code);
            put_numbers<4>(s, z, 0, width[0], inverse, token);
            put_numbers<2>(s, z, width[0], width[0] + width[1], inverse, token);
            put_numbers<1>(s, z, width[0] + width[1], count, inverse, token);
            if (threadIdx.x % 4 == 0)
                s.gains[token] = token < here ? (uint8_t)code : 0;
            for (uint32_t i = threadIdx.x; i < 512; i += THREADS)
                s.rest[i] = 0;
            __syncthreads();
            if (threadIdx.x < (here + 1) / 2)
                out[first / 2 + threadIdx.x] = (uint8_t)(s.gains[2 * threadIdx.x] | s.gains[2 * threadIdx.x + 1] << 4);
            const uint32_t full = here / GROUP, rest = here % GROUP;
            uint8_t *to = groups + (size_t)first / GROUP * 2 * bits;
            for (uint32_t i = threadIdx.x; i < full * count; i += THREADS) { /* a group's coordinate: two bytes a bit */
                const uint32_t group = i / count, coord = i % count;
                const uint8_t *numbers = s.numbers + coord * (TILE + 4) + group * GROUP;
                const uint32_t w = coord < width[0] ? 4 : coord < width[0] + width[1] ? 2 : 1;
                const uint32_t bit = w == 4   ? coord * 4
                                     : w == 2 ? width[0] * 4 + (coord - width[0]) * 2
                                              : width[0] * 4 + width[1] * 2 + coord - width[0] - width[1];
                unsigned long long packed = 0;
                for (uint32_t r = 0; r < GROUP; r++)
                    packed |= (unsigned long long)numbers[r] << (r * w);
                uint8_t *bytes = to + (size_t)group * 2 * bits + bit * 2;
                for (uint32_t b = 0; b < 2 * w; b++)
                    bytes[b] = (uint8_t)(packed >> (8 * b));
            }
            if (rest > 0) {
                for (uint32_t i = threadIdx.x; i < rest * count; i += THREADS) {
                    const uint32_t coord = i / rest, r = i % rest;
                    const uint32_t w = coord < width[0] ? 4 : coord < width[0] + width[1] ? 2 : 1;
                    const uint32_t bit = w == 4   ? coord * 4
                                         : w == 2 ? width[0] * 4 + (coord - width[0]) * 2
                                                  : width[0] * 4 + width[1] * 2 + coord - width[0] - width[1];
                    const uint32_t at_bit = bit * rest + r * w,
                                   number = s.numbers[coord * (TILE + 4) + full * GROUP + r];
                    atomicOr(&s.rest[at_bit / 32], number << (at_bit % 32));
                    if (at_bit % 32 + w > 32)
                        atomicOr(&s.rest[at_bit / 32 + 1], number >> (32 - at_bit % 32));
                }
                __syncthreads();
                for (uint32_t i = threadIdx.x; i < (rest * bits + 7) / 8; i += THREADS)
                    to[(size_t)full * 2 * bits + i] = (uint8_t)(s.rest[i / 4] >> (i % 4 * 8));
            }
            __syncthreads();
        }
        out += comp_run_bytes(n, bits);
    }
}

template <int PAD> static cudaError_t code_sides(const akv_comp *c, int side, uint32_t sides, cudaStream_t stream)
{
    COMP_TRY(comp_shared(code_blocks<PAD>, sizeof(Codes<PAD>)));
    code_blocks<PAD><<<dim3(c->blocks, c->H, sides), THREADS, sizeof(Codes<PAD>), stream>>>(*c, side);
    return cudaSuccess;
}

extern "C" cudaError_t akv_comp_code(const akv_comp *c, cudaStream_t stream)
{
    const uint32_t sides = c->pad[0] == c->pad[1] ? 2 : 1;
    for (int side = 0; side < 2; side += (int)sides)
        COMP_TRY(c->pad[side] == 64 ? code_sides<64>(c, side, sides, stream) : code_sides<128>(c, side, sides, stream));
    return cudaGetLastError();
}
