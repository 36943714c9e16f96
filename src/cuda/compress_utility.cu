/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_utility.cu - what the residuals are worth (src/codec/project.c): squared attention weights of the
 * observation queries, spread over neighbouring tokens, times what leaving a residual out does to the output.
 * Everything is a product on the tensor cores: logits, logit errors, values times outputs, and the spreading too, as a
 * product with a band matrix.
 */
#include "cuda/compress_device.cuh"

#define THREADS 512
#define STREAMS 2u /* of a block; each goes through tokens of its own */
#define STREAM_THREADS (THREADS / STREAMS)
#define ROWS AKV_COMP_ROWS
#define TILE 64u
#define BEFORE AKV_COMP_SPREAD_BEFORE
#define AFTER 3
#define BAND 208u /* distances -80 .. 127 */
static_assert(BEFORE == TILE && ROWS == STREAM_THREADS / 32 * 16,
              "a tile spreads into the next one; a warp has 16 rows");

template <int PAD> struct Stream {
    uint16_t key[TILE * comp_unit_stride<PAD>()];                              /* of this tile */
    uint16_t residual[TILE * comp_unit_stride<PAD>()], value[TILE * comp_unit_stride<PAD>()]; /* of the one before */
    float value_sq[TILE];
    float sums[STREAM_THREADS / 32][2][TILE];
};

template <int PAD> struct Shared {
    uint16_t query[ROWS * comp_unit_stride<PAD>()], output[ROWS * comp_unit_stride<PAD>()];
    Stream<PAD> stream[STREAMS];
    uint32_t band[BAND]; /* share that a token gives to one at this distance and, high half, at one less: bf16 */
};

static_assert(sizeof(Shared<AKV_COMP_MAX_DIM>) <= AKV_COMP_LEAST_SHARED, "the largest block of compression");

static __device__ __forceinline__ void sync_stream(uint32_t stream)
{
    asm volatile("bar.sync %0, %1;" ::"r"(stream + 1), "n"(STREAM_THREADS) : "memory");
}

static __device__ __forceinline__ void mma_bf16(float acc[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    mma_bf16(acc, a[0], a[1], a[2], a[3], b0, b1);
}

/* Share of a squared weight that its token gives to the one `distance` further on. */
static __device__ float share_of(const akv_comp &c, int distance)
{
    if (c.pooled_tokens == 0)
        return 0.0f;
    if (distance > 0)
        return distance < (int)BEFORE ? c.pool_weight * powf(c.decay, (float)distance) : 0.0f;
    return c.pool_weight * (distance == -1 ? 0.5f : distance == -2 ? 0.25f : distance == -3 ? 0.1f : 0.0f);
}

/* Keys of tile t; residuals and values of the one before. */
template <int PAD>
static __device__ __forceinline__ void load_tile(const akv_comp &c, uint32_t head, int64_t t, bool others,
                                                 Stream<PAD> &s)
{
    const uint32_t row = threadIdx.x % STREAM_THREADS / 4, at = row * comp_unit_stride<PAD>() + threadIdx.x % 4 * 8;
    const int64_t token = t * TILE + row, before = token - TILE;
    uint4 key[PAD / 32], value[PAD / 32];
    if (others) {
        const bool in = before < (int64_t)c.S;
#pragma unroll
        for (int j = 0; j < PAD / 32; j++)
            if (in && j * 32 < (int)c.pad[0])
                copy_async(s.residual + at + j * 32,
                           c.rows16[0] + ((size_t)head * c.S + before) * c.pad[0] + j * 32 + threadIdx.x % 4 * 8);
            else
                *(uint4 *)(s.residual + at + j * 32) = make_uint4(0, 0, 0, 0);
        comp_token_chunks<PAD>(c, value, AKV_SIDE_V, head, in ? (uint32_t)before : NO_TOKEN);
        if (threadIdx.x % 4 == 0)
            s.value_sq[row] = in ? c.value_sq[(size_t)head * c.S + before] : 0.0f;
    }
    comp_token_chunks<PAD>(c, key, AKV_SIDE_K, head, token >= 0 && token < (int64_t)c.S ? (uint32_t)token : NO_TOKEN);
#pragma unroll
    for (int j = 0; j < PAD / 32; j++)
        *(uint4 *)(s.key + at + j * 32) = key[j];
    if (others)
#pragma unroll
        for (int j = 0; j < PAD / 32; j++)
            *(uint4 *)(s.value + at + j * 32) = value[j];
    await_copies();
}

/* What a thread knows of its two rows. */
struct Rows {
    float bias[2]; /* log2 of the squared weight of logit 0 */
    float output_sq[2], error[2];
    uint32_t seen[2]; /* tokens that the row attends to */
};

/*
 * Squared weights of tile t, 16 rows: as operand A of the spreading, two tiles of 8 tokens a step. slope: with a cap,
 * squared slopes of the logits.
 */
template <int PAD, bool CAP>
static __device__ __forceinline__ void weights_of(const akv_comp &c, const Shared<PAD> &s, const Stream<PAD> &stream,
                                                  uint32_t row0, int64_t t, const Rows &rows, uint32_t weight[4][4],
                                                  uint32_t slope[8][2])
{
    const uint32_t lane = threadIdx.x % 32;
    float acc[8][4];
    comp_logits<PAD>(acc, s.query, stream.key, row0);
    const float twice = 2.0f * 1.442695041f * (CAP ? 1.0f : c.scale);
    const bool all_seen = t >= 0 && (uint64_t)(t + 1) * TILE <= c.earlier;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float slopes[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float l = acc[n][i];
            const int64_t token = t * TILE + n * 8 + lane % 4 * 2 + (i & 1);
            const bool seen = all_seen || (t >= 0 && token < rows.seen[i / 2]);
            if (CAP) {
                l = akv_cap(l * c.scale, c.cap);
                const float part = seen ? l / c.cap : 0.0f;
                slopes[i] = (1.0f - part * part) * (1.0f - part * part);
            }
            acc[n][i] = seen ? akv_exp2(fmaf(l, twice, rows.bias[i / 2])) : 0.0f;
        }
        weight[n / 2][n % 2 * 2] = pack_bf16(acc[n][0], acc[n][1]);
        weight[n / 2][n % 2 * 2 + 1] = pack_bf16(acc[n][2], acc[n][3]);
        if (CAP) {
            slope[n][0] = pack_halves(slopes[0], slopes[1]);
            slope[n][1] = pack_halves(slopes[2], slopes[3]);
        }
    }
}

/* The same without what tokens before `sinks` give; this lane's tokens of the step begin at `token`. */
static __device__ __forceinline__ void hide_sinks(uint32_t a[4], int64_t token, int64_t sinks)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t at = token + i / 2 * 8;
        a[i] &= (at < sinks ? 0u : 0xffffu) | (at + 1 < sinks ? 0u : 0xffff0000u);
    }
}

/* Sums over the rows of what tile t - 1 is worth: weight[0 .. 2] of tiles t - 2, t - 1, t. */
template <int PAD, bool CAP>
static __device__ __forceinline__ void worth_of(const akv_comp &c, const Shared<PAD> &s, Stream<PAD> &stream,
                                                uint32_t row0, int64_t t, const Rows &rows,
                                                const uint32_t weight[3][4][4], const uint32_t slope[8][2])
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, two = lane % 4 * 2, at = lane % 4 * 8,
                   warp = threadIdx.x % STREAM_THREADS / 32;
    const uint16_t *query = s.query + (row0 + g) * comp_unit_stride<PAD>() + at,
                   *output = s.output + (row0 + g) * comp_unit_stride<PAD>() + at;
    const float coherent = (1.0f - c.incoherent) * c.scale * c.scale;
    const int64_t first = (t - 2) * TILE; /* the first of the giving tokens */
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        float error[2][4], cross[2][4], spread[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                error[n][i] = cross[n][i] = spread[n][i] = 0.0f;
#pragma unroll
        for (int j = 0; j < PAD / 32; j++) {
            const uint4 x = *(const uint4 *)(query + j * 32),
                        y = *(const uint4 *)(query + j * 32 + 8 * comp_unit_stride<PAD>());
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint4 b = *(const uint4 *)(stream.residual + ((pair * 2 + n) * 8 + g) * comp_unit_stride<PAD>() +
                                                 at + j * 32);
                mma_f16(error[n], x.x, y.x, x.y, y.y, b.x, b.y);
                mma_f16(error[n], x.z, y.z, x.w, y.w, b.z, b.w);
            }
        }
#pragma unroll
        for (int j = 0; j < PAD / 32; j++) {
            const uint4 x = *(const uint4 *)(output + j * 32),
                        y = *(const uint4 *)(output + j * 32 + 8 * comp_unit_stride<PAD>());
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint4 b =
                    *(const uint4 *)(stream.value + ((pair * 2 + n) * 8 + g) * comp_unit_stride<PAD>() + at + j * 32);
                mma_f16(cross[n], x.x, y.x, x.y, y.y, b.x, b.y);
                mma_f16(cross[n], x.z, y.z, x.w, y.w, b.z, b.w);
            }
        }
        if (c.pooled_tokens > 0)
#pragma unroll
            for (int step = 0; step < 9; step++) { /* 16 giving tokens each, from `first` on */
                const int furthest = pair * 16 + 64 - step * 16; /* of the pair's first token from the step's first */
                if (furthest + 15 < -AFTER || furthest - 15 >= (int)BEFORE)
                    continue;
                uint32_t a[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[i] = weight[step / 4][step % 4][i];
                if (first + step * 16 < (int64_t)c.sinks)
                    hide_sinks(a, first + step * 16 + two, c.sinks);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int distance = furthest + n * 8;
                    if (distance + 7 < -AFTER || distance - 15 >= (int)BEFORE)
                        continue;
                    const uint32_t *band = s.band + 80 + distance + (int)g - (int)two;
                    mma_bf16(spread[n], a, band[0], band[-8]);
                }
            }
        float sums[8]; /* [tile of 8][even, odd token][key, value] */
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const float value_sq = stream.value_sq[(pair * 2 + n) * 8 + two + odd];
                float key_sum = 0, value_sum = 0;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t own = weight[1][pair][n * 2 + h];
                    const float w = __uint_as_float(odd ? own & 0xffff0000u : own << 16) + spread[n][h * 2 + odd];
                    const float e = error[n][h * 2 + odd];
                    const float deviation =
                        fmaxf(0.0f, fmaf(-2.0f, cross[n][h * 2 + odd], value_sq + rows.output_sq[h]));
                    float squared = fmaf(coherent * e, e, rows.error[h]);
                    if (CAP) {
                        const float2 both = __half22float2(as_half2(slope[pair * 2 + n][h]));
                        squared *= odd ? both.y : both.x;
                    }
                    key_sum = fmaf(w * deviation, squared, key_sum);
                    value_sum += w;
                }
                sums[n * 4 + odd * 2] = key_sum;
                sums[n * 4 + odd * 2 + 1] = value_sum;
            }
        /* Over the 8 lanes that hold other rows: each ends up with one of the 8 sums. */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float mine = lane & 16 ? sums[i + 4] : sums[i], other = lane & 16 ? sums[i] : sums[i + 4];
            sums[i] = mine + __shfl_xor_sync(0xffffffffu, other, 16);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float mine = lane & 8 ? sums[i + 2] : sums[i], other = lane & 8 ? sums[i] : sums[i + 2];
            sums[i] = mine + __shfl_xor_sync(0xffffffffu, other, 8);
        }
        const float mine = lane & 4 ? sums[1] : sums[0], other = lane & 4 ? sums[0] : sums[1];
        stream.sums[warp][lane / 4 % 2][(pair * 2 + lane / 16) * 8 + two + lane / 8 % 2] =
            mine + __shfl_xor_sync(0xffffffffu, other, 4);
    }
}

/* Sums of a tile over the warps: utilities, or their part so far. */
template <int PAD>
static __device__ __forceinline__ void close_tile(const akv_comp &c, const Stream<PAD> &s, uint32_t head, int64_t tile,
                                                  uint32_t first_row)
{
    const uint32_t in_stream = threadIdx.x % STREAM_THREADS, side = in_stream / TILE, i = in_stream % TILE;
    const int64_t token = tile * TILE + i;
    if (side >= 2 || token >= (int64_t)c.S)
        return;
    const size_t at = (size_t)head * c.S + token;
    float u = 0;
    for (uint32_t w = 0; w < STREAM_THREADS / 32; w++)
        u += s.sums[w][side][i];
    u = u * c.left[side][at] + (first_row > 0 ? c.rank[side][at] : 0.0f);
    if (first_row + ROWS >= c.rows) /* anchors are exact already */
        u = c.own[at] != 0 ? -1.0f : u >= 0.0f ? fminf(u, 3e38f) : 0.0f;
    c.rank[side][at] = u;
}

/* Utilities of tiles [begin, end) of a head from one chunk of rows, by one stream. */
template <int PAD, bool CAP>
static __device__ __forceinline__ void go_through(const akv_comp &c, Shared<PAD> &s, uint32_t head, int64_t begin,
                                                  int64_t end, uint32_t first_row)
{
    const uint32_t which = threadIdx.x / STREAM_THREADS, in_stream = threadIdx.x % STREAM_THREADS,
                   row0 = in_stream / 32 * 16, g = threadIdx.x % 32 / 4;
    Stream<PAD> &stream = s.stream[which];
    const bool active = first_row + row0 < c.rows; /* the same for a warp */
    Rows rows;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t row = first_row + row0 + g + 8 * h;
        const size_t at = (size_t)head * c.rows + row;
        const bool in = row < c.rows;
        rows.seen[h] = in ? (uint32_t)c.earlier + row % c.W + 1 : 0;
        rows.bias[h] = in ? 2.0f * (log2f(c.inverse[at]) - c.max[at]) : -INFINITY;
        rows.output_sq[h] = in ? c.output_sq[at] : 0.0f;
        rows.error[h] = in ? c.incoherent * c.row_sq[at] / (float)c.dim[0] * c.scale * c.scale : 0.0f;
    }
    for (uint32_t i = in_stream; i < sizeof stream.sums / 4; i += STREAM_THREADS)
        (&stream.sums[0][0][0])[i] = 0.0f;
    uint32_t weight[3][4][4] = {}, slope[2][8][2] = {};
    for (int64_t t = begin - 1; t <= end && begin < end; t++) {
        const bool worth = t > begin;
        sync_stream(which); /* the tile before is done with */
        if (t >= begin + 2)
            close_tile<PAD>(c, stream, head, t - 2, first_row);
        load_tile<PAD>(c, head, t, worth, stream);
        sync_stream(which);
        if (!active)
            continue;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                weight[0][i][j] = weight[1][i][j];
                weight[1][i][j] = weight[2][i][j];
            }
        if (CAP)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                slope[0][i][0] = slope[1][i][0];
                slope[0][i][1] = slope[1][i][1];
            }
        weights_of<PAD, CAP>(c, s, stream, row0, t, rows, weight[2], slope[1]);
        if (worth)
            worth_of<PAD, CAP>(c, s, stream, row0, t, rows, weight, slope[0]);
    }
    sync_stream(which);
    if (begin < end)
        close_tile<PAD>(c, stream, head, end - 1, first_row);
}

/*
 * Utilities of all tokens. Blocks share the tiles of all heads out evenly, and the two streams of a block its tiles; so
 * blocks stay, and may wait at their end for the eigenvalues, which are found meanwhile on the processors left over.
 */
template <int PAD, bool CAP> static __global__ void __launch_bounds__(THREADS, 1) utilities(COMP_ARG)
{
    extern __shared__ float4 memory[];
    Shared<PAD> &s = *(Shared<PAD> *)memory;
    const uint64_t tiles = (c.S + TILE - 1) / TILE, all = tiles * c.H, stop = all * (blockIdx.x + 1) / gridDim.x;
    for (uint32_t i = threadIdx.x; i < BAND; i += THREADS)
        s.band[i] = pack_bf16(share_of(c, (int)i - 80), share_of(c, (int)i - 81));
    for (uint64_t at = all * blockIdx.x / gridDim.x; at < stop;) {
        const uint64_t begin = at % tiles, left = stop - at, end = begin + left < tiles ? begin + left : tiles,
                       middle = (begin + end + 1) / 2;
        const uint32_t head = (uint32_t)(at / tiles);
        for (uint32_t first_row = 0; first_row < c.rows; first_row += ROWS) {
            __syncthreads();
            comp_load_rows<PAD>(c, c.query16, head, first_row, ROWS, s.query);
            comp_load_rows<PAD>(c, c.output16, head, first_row, ROWS, s.output);
            __syncthreads();
            const bool second = threadIdx.x >= STREAM_THREADS;
            go_through<PAD, CAP>(c, s, head, (int64_t)(second ? middle : begin), (int64_t)(second ? end : middle),
                                 first_row);
        }
        at += end - begin;
    }
    akv_wait_for_previous(); /* what follows needs the kernel before as well */
}

template <int PAD, bool CAP> static cudaError_t launch(const akv_comp *c, cudaStream_t stream)
{
    COMP_TRY(comp_shared(utilities<PAD, CAP>, sizeof(Shared<PAD>)));
    const uint32_t others = 2 * c->H; /* blocks of the kernel before */
    return comp_launch_early(utilities<PAD, CAP>, dim3(AKV_CUDA_BLOCKS - (others <= AKV_CUDA_BLOCKS / 2 ? others : 0)),
                             THREADS, sizeof(Shared<PAD>), stream, *c);
}

extern "C" cudaError_t akv_comp_utilities(const akv_comp *c, cudaStream_t stream)
{
    if (c->pad[0] == 64 && c->pad[1] == 64)
        return c->cap > 0.0f ? launch<64, true>(c, stream) : launch<64, false>(c, stream);
    return c->cap > 0.0f ? launch<128, true>(c, stream) : launch<128, false>(c, stream);
}
