/* SPDX-License-Identifier: Apache-2.0 */
/* test_decode.c - akv_segment_decode and the segment's description, on segments with random valid bytes and dense ones.
 */
#include "akv_test.h"
#include "cases.h"
#include "check_segment.h"

static void random_bytes(void)
{
    const uint32_t dims[][2] = {{64, 64},   {80, 80},   {96, 96}, {112, 112}, {128, 128},
                                {192, 128}, {256, 256}, {2, 6},   {10, 2}};
    const uint64_t lengths[] = {1, 15, 16, 17, 33, 64, 65, 1023, 1024, 1025, 2049};
    unsigned number = 0;
    for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++)
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++, number++) {
            char name[96];
            snprintf(name, sizeof name, "random segment %u: dk %u dv %u S %llu", number, dims[d][0], dims[d][1],
                     (unsigned long long)lengths[l]);
            spec s = {
                .name = name, .S = lengths[l], .H = 1 + number % 3, .G = 1, .dk = dims[d][0], .dv = dims[d][1], .W = 1};
            s.rotary = number % 4 == 3 ? s.dk / 4 * 2 : number % 7 == 6 ? 0 : s.dk;
            s.style = number % 2 ? AKV_ROPE_INTERLEAVED : AKV_ROPE_HALF_SPLIT;
            s.magnitude = number % 5 == 4 ? 1.3 : 1;
            s.gaps = number % 3 == 2;
            s.first_position = number % 6 == 5 ? 100000 : number % 6 == 4 ? -50 : 0;
            uint32_t flags =
                (number % 8 == 5 ? AKV_FLAG_PLAIN_CODES : 0) | (number % 8 == 6 ? AKV_FLAG_ANCHORS_POST_ROPE : 0);
            uint32_t anchors = number % 9 == 8 ? 300 : 20;
            if (anchors > s.S)
                anchors = (uint32_t)s.S;
            const double density[] = {0.3, 0, 1, 0.03};
            akv_segment *segment = random_segment(&s, anchors, density[number % 4], flags, number);
            check_decode(name, segment);
            akv_segment_release(segment);
        }
}

/* The ladder coding; what is drawn also opens as a stranger's bytes. */
static void random_ladders(void)
{
    const uint32_t dims[][2] = {{64, 64},   {80, 80},   {96, 96}, {112, 112}, {128, 128},
                                {192, 128}, {256, 256}, {2, 6},   {10, 2}};
    const uint64_t lengths[] = {1, 15, 16, 17, 33, 64, 65, 1023, 1024, 1025, 2049};
    unsigned number = 0;
    for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++)
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++, number++) {
            char name[96];
            snprintf(name, sizeof name, "random ladder %u: dk %u dv %u S %llu", number, dims[d][0], dims[d][1],
                     (unsigned long long)lengths[l]);
            spec s = {
                .name = name, .S = lengths[l], .H = 1 + number % 3, .G = 1, .dk = dims[d][0], .dv = dims[d][1], .W = 1};
            s.rotary = number % 4 == 3 ? s.dk / 4 * 2 : number % 7 == 6 ? 0 : s.dk;
            s.style = number % 2 ? AKV_ROPE_INTERLEAVED : AKV_ROPE_HALF_SPLIT;
            s.magnitude = number % 5 == 4 ? 1.3 : 1;
            s.gaps = number % 3 == 2;
            s.first_position = number % 6 == 5 ? 100000 : number % 6 == 4 ? -50 : 0;
            const uint32_t anchors[] = {20, 1, 2, 300, 5};
            const double density[] = {0.3, 0, 1, 0.03};
            uint32_t k = anchors[number % 5];
            akv_segment *segment = random_ladder_segment(&s, k > s.S ? (uint32_t)s.S : k, density[number % 4], number);
            check_decode(name, segment);
            akv_segment *opened = NULL;
            akv_diag diag = {0};
            size_t bytes;
            const void *data = akv_segment_data(segment, &bytes);
            CHECK_STATUS(akv_segment_open(data, bytes, 1, NULL, &opened, &diag), AKV_OK, &diag);
            akv_segment_release(opened);
            akv_segment_release(segment);
        }
}

static void dense(void)
{
    for (int dtype = 0; dtype < 3; dtype++)
        for (int lay = 0; lay < LAY_COUNT; lay++) {
            spec s = {.name = "dense",
                      .S = 77,
                      .H = 3,
                      .G = 1,
                      .dk = 48,
                      .dv = 20,
                      .W = 4,
                      .rotary = 48,
                      .dtype = (akv_dtype)dtype,
                      .layout_k = lay,
                      .layout_v = (lay + 1) % LAY_COUNT,
                      .keep = 1,
                      .seed = 2,
                      .gaps = lay % 2};
            fixture f;
            fixture_make(&s, &f);
            f.layer.queries.data = NULL; /* not read */
            akv_segment *segment = NULL;
            akv_diag diag = {0};
            CHECK_STATUS(akv_segment_create_dense(&f.layer, NULL, &segment, &diag), AKV_OK, &diag);
            if (segment != NULL) {
                check_decode("dense", segment);
                akv_segment_info info;
                akv_segment_info_init(&info);
                CHECK_STATUS(akv_segment_get_info(segment, &info, &diag), AKV_OK, &diag);
                CHECK(info.kind == AKV_SEGMENT_DENSE && info.dense_reason == AKV_DENSE_REQUESTED &&
                      info.dense_dtype == (akv_dtype)dtype);
                CHECK(info.bytes.total == ref_dense_bytes(&f.layer.shape, dtype == AKV_F32 ? 4 : 2));
                CHECK(info.dense_bytes == 77u * 3 * 68 * 2 && info.first_position == f.positions[0] &&
                      info.last_position == f.positions[76]);
                float *k = must(malloc(77 * 48 * sizeof *k)), *v = must(malloc(77 * 20 * sizeof *v));
                for (uint32_t h = 0; h < 3; h++) {
                    CHECK_STATUS(akv_segment_decode(segment, h, 0, 77, k, v, &diag), AKV_OK, &diag);
                    int same = 1;
                    for (uint64_t p = 0; p < 77; p++) {
                        for (uint32_t i = 0; i < 48; i++)
                            same &= k[p * 48 + i] == akv_tensor_at(&f.layer.keys, h, (int64_t)p, i);
                        for (uint32_t i = 0; i < 20; i++)
                            same &= v[p * 20 + i] == akv_tensor_at(&f.layer.values, h, (int64_t)p, i);
                    }
                    CHECK_MSG(same, "dense dtype %d layout %d head %u is not what was given", dtype, lay, h);
                }
                free(k);
                free(v);
            }
            akv_segment_release(segment);
            fixture_free(&f);
        }
}

static void ranges(void)
{
    spec s = {.name = "ranges", .S = 100, .H = 2, .G = 1, .dk = 64, .dv = 64, .W = 1, .rotary = 64};
    akv_segment *segment = random_segment(&s, 20, 0.3, 0, 1);
    float *k = must(malloc(100 * 64 * sizeof *k));
    akv_diag diag = {0};
    CHECK_STATUS(akv_segment_decode(segment, 2, 0, 1, k, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_decode(segment, 0, 0, 101, k, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_decode(segment, 0, 100, 1, k, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_decode(segment, 0, UINT64_MAX, 2, k, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_decode(segment, 0, 1, UINT64_MAX, k, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_decode(NULL, 0, 0, 1, k, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_decode(segment, 0, 0, 0, k, NULL, &diag), AKV_OK, &diag);
    CHECK_STATUS(akv_segment_decode(segment, 0, 0, 5, NULL, NULL, &diag), AKV_OK, &diag);
    free(k);
    akv_segment_release(segment);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(random_bytes);
    TEST(random_ladders);
    TEST(dense);
    TEST(ranges);
    return TEST_DONE();
}
